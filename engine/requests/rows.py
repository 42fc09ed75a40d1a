"""Marks rows of logits without a possible token. The scheduler then fails their requests.

A request can exclude every token: its grammar allows none, or forbids all allowed tokens. And a model can compute NaN.
One reduction per step finds such rows on any device, and nothing waits for it. The sampled token becomes NO_TOKEN on
its way to the host.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

NO_TOKEN = -1


def without_token(logits: torch.Tensor) -> torch.Tensor:
    """Which rows [B] of float logits [B, V] hold a NaN, or nothing above -inf."""
    return ~(logits.amax(-1) > -torch.inf)  # amax of a row with NaN is NaN, and the comparison is false


def marking(original: Any) -> Any:
    """Replaces vLLM's `Sampler`.

    With drafts (`predict_bonus_token`) rows stay unmarked: the rejection sampler drops invalid tokens.
    """

    class Sampler(original):  # type: ignore[misc]
        def sample(self, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.without_token = without_token(logits)  # the original changes the logits in place
            return super().sample(logits, *arguments, **options)

        def forward(
            self, logits: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool = False, **options: Any
        ) -> Any:
            output = super().forward(logits, sampling_metadata, predict_bonus_token, **options)
            if not predict_bonus_token:
                output.sampled_token_ids.masked_fill_(self.without_token[:, None], NO_TOKEN)
            return output

    return Sampler


def feeding_tokens(original: Callable[..., None]) -> Callable[..., None]:
    """Replaces `GPUModelRunner._prepare_input_ids`, which feeds the last step's tokens while they are on the GPU.

    A marked row's request is already in the next step, whose result is discarded. In that step it is fed token 0.
    """

    @wraps(original)
    def prepare(runner: Any, *arguments: Any, **options: Any) -> None:
        if runner._pp_recv_work is not None:  # with stages, the last one sends the tokens
            runner._pp_recv_work.wait()
            runner._pp_recv_work = None
        sampled = runner.input_batch.prev_sampled_token_ids
        if sampled is not None:  # a copy, since the tensor itself is being copied to the host
            runner.input_batch.prev_sampled_token_ids = sampled.clamp(min=0)
        original(runner, *arguments, **options)

    return prepare
