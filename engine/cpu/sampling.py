"""Sampling with top-p on CPUs, without a pass over the whole vocabulary per request.

Such a pass costs a small model half a step. Top-p nearly always keeps only a few tokens. They are found among the
likeliest without sorting the vocabulary, and drawn without a random number per token of it. If top-p keeps more, vLLM
samples.

A row's token depends only on that row and its seed, never on the requests beside it. Every row gets a token, whatever
its logits are. engine/requests/rows.py fails rows without a possible token.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

CANDIDATES = 1024  # finding these among 49,152 takes a tenth of the time of sorting all
SMALLEST = torch.finfo(torch.float32).tiny  # lower bound of an exponential number: torch also draws zeros

Mask = Callable[..., torch.Tensor]
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def by_candidates(original: Mask) -> Mask:
    """Replaces vLLM's `apply_top_k_top_p_pytorch`."""

    @wraps(original)
    def apply(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, allow_cpu_sync: bool = False
    ) -> torch.Tensor:
        if p is None or logits.device.type != "cpu":
            return original(logits, k, p, allow_cpu_sync)
        lowest, decided = lowest_kept(logits, k, p)
        if not decided.all():
            rest = (~decided).nonzero()[:, 0]
            masked = original(logits[rest], None if k is None else k[rest], p[rest], allow_cpu_sync)
            logits[rest] = masked  # `lowest` is -inf for these rows, so the line below masks nothing in them
        return logits.masked_fill_(logits < lowest, -torch.inf)

    return apply


def lowest_kept(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit [B, 1] that top-k and top-p keep per row, and the rows [B] that the candidates decide.

    Top-p keeps a token if the likelier tokens have less than p of the probability that top-k keeps. The likeliest token
    always stays. Of several tokens with the lowest logit vLLM keeps some, and this keeps all.

    Args:
        logits: float32 [B, V].
        k: [B], V for a row without top-k.
        p: [B], 1 for a row without top-p.
    """
    vocabulary = logits.shape[1]
    candidates = logits.topk(min(CANDIDATES, vocabulary), dim=1).values  # the highest first
    count = candidates.shape[1]
    decided = torch.ones_like(p, dtype=torch.bool)
    lowest = torch.full_like(candidates[:, :1], -torch.inf)
    likeliest = logits.softmax(1).amax(1, keepdim=True)  # in torch, five times as fast as with logsumexp
    if k is not None:
        limited = (k < vocabulary)[:, None]
        decided &= ~limited[:, 0] | (k <= count)
        last = k.clamp(min=1, max=count).long()[:, None] - 1
        lowest = torch.where(limited, candidates.gather(1, last), lowest)
        candidates = candidates.masked_fill(limited & (candidates < lowest), -torch.inf)
        likeliest = torch.where(limited, candidates.softmax(1).amax(1, keepdim=True), likeliest)
    probabilities = (candidates - candidates[:, :1]).exp() * likeliest
    kept = (probabilities.cumsum(1) - probabilities < p[:, None]).sum(1, keepdim=True).clamp(min=1)
    limited = (p < 1)[:, None]
    if count < vocabulary:
        decided &= ~(limited & (kept == count))[:, 0]
    lowest = torch.where(limited, torch.maximum(lowest, candidates.gather(1, kept - 1)), lowest)
    return lowest.masked_fill(~decided[:, None], -torch.inf), decided


def seeded_among_few(original: Forward) -> Forward:
    """Replaces `TopKTopPSampler.forward_cpu`, which ignores seeds unless every request of a step has one."""

    @wraps(original)
    def forward(
        sampler: Any,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from vllm.v1.sample.ops import topk_topp_sampler

        if sampler.use_fp64_gumbel:  # asked for by a flag; it keeps seeds in a mixed batch
            return original(sampler, logits, generators, k, p)
        logits = topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
        returned = None
        if sampler.logprobs_mode == "processed_logits":
            returned = logits
        elif sampler.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(-1, dtype=torch.float32)
        return draw(logits, generators), returned

    return forward


def draw(logits: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """Draws one token [B] per row of masked logits [B, V], by its probability.

    The token with the highest logit - log(e), e exponential, has the probability that softmax gives it (the Gumbel
    trick). A row with a generator draws one number per token of the vocabulary, so masks do not change the numbers.
    """
    kept = logits > -torch.inf
    if kept.sum() > CANDIDATES * len(logits):
        noise = torch.empty_like(logits).exponential_()
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        return (logits - noise.clamp_(min=SMALLEST).log_()).argmax(-1)
    rows, tokens = kept.nonzero(as_tuple=True)
    few = torch.empty(len(rows)).exponential_()
    for row, generator in generators.items():
        mine = rows == row
        few[mine] = torch.empty(logits.shape[1]).exponential_(generator=generator)[tokens[mine]]
    scores = logits[rows, tokens] - few.clamp_(min=SMALLEST).log_()
    highest = scores.new_full((len(logits),), -torch.inf).scatter_reduce(0, rows, scores, "amax")
    wins = scores == highest[rows]
    return rows.new_zeros(len(logits)).index_put((rows[wins],), tokens[wins])
