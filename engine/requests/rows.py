"""A row of logits that no token can be drawn from: it is marked here, and the scheduler fails its request.

What a request asks for can leave no token: a grammar that allows none, allowed tokens that a grammar forbids. And a
model can compute NaN. One reduction a step finds such rows, on whatever device; nothing waits for it. The sampled
token becomes NO_TOKEN on its way to the host.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

NO_TOKEN = -1


def without_token(logits: torch.Tensor) -> torch.Tensor:
    """Which rows [B] of float logits [B, V] hold a NaN, or nothing above -inf."""
    return ~(logits.amax(-1) > -torch.inf)  # amax of a row with a NaN is NaN, which is above nothing


def marking(original: Any) -> Any:
    """Stands in for vLLM's `Sampler`.

    With drafts (`predict_bonus_token`) rows stay unmarked: there the rejection sampler drops what is no token.
    """

    class Sampler(original):  # type: ignore[misc]
        def sample(self, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.without_token = without_token(logits)  # the original changes them in place
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
    """Stands in for `GPUModelRunner._prepare_input_ids`, which feeds the last step's tokens, still on the GPU.

    A marked row's request is in the next step already, which is thrown away. Until then it is fed token 0.
    """

    @wraps(original)
    def prepare(runner: Any, *arguments: Any, **options: Any) -> None:
        sampled = runner.input_batch.prev_sampled_token_ids
        if sampled is not None:  # a copy: the tensor itself is on its way to the host
            runner.input_batch.prev_sampled_token_ids = sampled.clamp(min=0)
        original(runner, *arguments, **options)

    return prepare
