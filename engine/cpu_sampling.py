"""Sampling with top-p on CPUs, where going through the vocabulary costs a small model half a step for each request.

What top-p keeps are nearly always a few tokens: found among the likeliest, without sorting all, and drawn from without
a random number for each of all. Where they are more, vLLM does it.
"""

from collections.abc import Callable
from functools import wraps

import torch

CANDIDATES = 1024  # finding these among 49,152 takes a tenth of sorting all

Mask = Callable[..., torch.Tensor]
Draw = Callable[[torch.Tensor], torch.Tensor]


def by_candidates(original: Mask) -> Mask:
    """Stands in for vLLM's `apply_top_k_top_p_pytorch`."""

    @wraps(original)
    def apply(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, allow_cpu_sync: bool = False
    ) -> torch.Tensor:
        lowest = None if p is None or logits.device.type != "cpu" else lowest_kept(logits, k, p)
        if lowest is None:
            return original(logits, k, p, allow_cpu_sync)
        return logits.masked_fill_(logits < lowest, -torch.inf)

    return apply


def lowest_kept(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor | None:
    """The lowest logit [B, 1] that top-k and top-p leave of each row; None where the likeliest do not decide it.

    Top-p keeps a token if those likelier than it have less than p of the probability among what top-k leaves. Of tokens
    with the lowest logit vLLM keeps some, here all stay.

    Args:
        logits: float32 [B, V].
        k: [B], V for a row without top-k.
        p: [B], 1 for a row without top-p.
    """
    vocabulary = logits.shape[1]
    candidates = logits.topk(min(CANDIDATES, vocabulary), dim=1).values  # the highest first
    count = candidates.shape[1]
    lowest = torch.full_like(candidates[:, :1], -torch.inf)
    likeliest = logits.softmax(1).amax(1, keepdim=True)  # its probability; in torch, five times as fast as logsumexp
    if k is not None:
        limited = (k < vocabulary)[:, None]
        if (limited[:, 0] & (k > count)).any():
            return None
        last = k.clamp(max=count).long()[:, None] - 1
        lowest = torch.where(limited, candidates.gather(1, last), lowest)
        candidates = candidates.masked_fill(candidates < lowest, -torch.inf)
        likeliest = torch.where(limited, candidates.softmax(1).amax(1, keepdim=True), likeliest)
    probabilities = (candidates - candidates[:, :1]).exp() * likeliest
    kept = (probabilities.cumsum(1) - probabilities < p[:, None]).sum(1, keepdim=True)
    limited = (p < 1)[:, None]
    if count < vocabulary and (limited & (kept == count)).any():
        return None
    return torch.where(limited, torch.maximum(lowest, candidates.gather(1, kept - 1)), lowest)


def among_few(original: Draw) -> Draw:
    """Stands in for vLLM's `compiled_random_sample`: of each row of masked logits [B, V] a token, by its likelihood.

    The token with the highest logit - log(e), e exponential, is as likely as softmax says (the Gumbel trick).
    """

    @wraps(original)
    def draw(logits: torch.Tensor) -> torch.Tensor:
        kept = logits > -torch.inf
        if logits.device.type != "cpu" or kept.sum() > CANDIDATES * len(logits):
            return original(logits)
        rows, tokens = kept.nonzero(as_tuple=True)
        scores = logits[rows, tokens] - torch.empty(len(rows)).exponential_().log()
        highest = scores.new_full((len(logits),), -torch.inf).scatter_reduce(0, rows, scores, "amax")
        wins = scores == highest[rows]
        return rows.new_zeros(len(logits)).index_put((rows[wins],), tokens[wins])

    return draw
