"""What the attention ops compute (kernels/contracts/attention.h), in float64, and random batches to try them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# What a block table holds past a request's blocks: a kernel that follows it faults.
NO_BLOCK = 1 << 29


@dataclass(frozen=True)
class Batch:
    """Requests with new tokens, whose `key` and `value` [T, H_kv, D] are the last positions; see contracts/attention.h.

    The cache holds NaN wherever no position of a request lies. A kernel that lets these have an influence shows it.
    """

    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return self.query_start.diff().tolist()


def random_batch(
    lengths: Sequence[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    generator: torch.Generator,
    *,
    outliers: bool = False,
    interleaved: bool = True,
) -> Batch:
    """A batch of requests, each (new tokens, all positions), with blocks in random order.

    Args:
        outliers: two channels of keys are 30 times larger, as in real models, so few positions have all the weight.
        interleaved: the caches lie in memory as [blocks, 2, H_kv, B, D], the layout of engine/layers/attention.py;
            otherwise as [2, blocks, B, H_kv, D].
    """
    device = generator.device
    blocks_of = [-(-total // block_size) for _, total in lengths]
    order = torch.randperm(sum(blocks_of) + 1, generator=generator, device=device).int()
    shape = (len(order), 2, kv_heads, block_size, head_dim)
    if interleaved:
        cache = torch.full(shape, torch.nan, dtype=torch.float16, device=device)
        k_cache, v_cache = cache.permute(0, 1, 3, 2, 4).unbind(1)
    else:
        cache = torch.full(
            (2, len(order), block_size, kv_heads, head_dim), torch.nan, dtype=torch.float16, device=device
        )
        k_cache, v_cache = cache.unbind(0)
    table = torch.full((len(lengths), max(blocks_of) + 1), NO_BLOCK, dtype=torch.int32, device=device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).half()

    channel = torch.ones(head_dim, device=device)
    if outliers:
        channel[torch.randperm(head_dim, generator=generator, device=device)[:2]] = 30
    keys, values, slots, taken = [], [], [], 0
    for request, (new, total) in enumerate(lengths):
        blocks = order[taken : taken + blocks_of[request]]
        taken += len(blocks)
        table[request, : len(blocks)] = blocks
        positions = torch.arange(total, device=device)
        slot = blocks[positions // block_size].long() * block_size + positions % block_size
        k = (normal(total, kv_heads, head_dim) * channel).half()
        v = normal(total, kv_heads, head_dim)
        k_cache[slot // block_size, slot % block_size] = k
        v_cache[slot // block_size, slot % block_size] = v
        keys.append(k[total - new :])
        values.append(v[total - new :])
        slots.append(slot[total - new :])
    query_lens = torch.tensor([new for new, _ in lengths], device=device)
    starts = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int()
    return Batch(
        normal(int(query_lens.sum()), q_heads, head_dim),
        torch.cat(keys), torch.cat(values), k_cache, v_cache, table, starts,
        torch.tensor([total for _, total in lengths], dtype=torch.int32, device=device), torch.cat(slots),
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact result, allowed error of the kernels), both float64 [T, H, D]; 0 for rows of no request.

    Three errors are allowed:

        weights rounded to fp16      relative 2^-11, absolute 2^-25 of the largest
        the result rounded to fp16   relative 2^-11
        fp32 sums of D products      D 2^-23 of a score's sum of magnitudes, which is e^score's relative error
    """
    group, head_dim, block_size = q.shape[1] // k_cache.shape[2], q.shape[2], k_cache.shape[1]
    exact, allowed = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    for request, total in enumerate(seq_lens.tolist()):
        first, last = query_start[request : request + 2].tolist()
        if first == last:
            continue
        positions = torch.arange(total, device=q.device)
        block = block_table[request].long()[positions // block_size]
        # [H_kv, 1, positions, D]
        k, v = (cache[block, positions % block_size].double().transpose(0, 1)[:, None] for cache in (k_cache, v_cache))
        step = max(1, (1 << 26) // (total * q.shape[1]))
        for begin in range(first, last, step):
            rows = torch.arange(begin, min(begin + step, last), device=q.device)
            query = q[rows].double().unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [H_kv, G, rows, D]
            score = query @ k.mT * scale
            wrong = query.abs() @ k.abs().mT * (scale * head_dim * 2.0**-23)
            if soft_cap:
                score, wrong = soft_cap * (score / soft_cap).tanh(), wrong + soft_cap * 2.0**-19
            ends = total - last + rows[:, None] + 1
            unseen = (positions >= ends) | ((positions < ends - window) if window else False)
            score.masked_fill_(unseen, -torch.inf)
            highest = score.amax(-1, keepdim=True)
            weight = (score - highest).exp()
            whole = weight.sum(-1, keepdim=True)
            weight /= whole
            magnitude = weight @ v.abs()
            tiny = (~unseen).double() @ v.abs() * (2.0**-25 / whole)
            error = (weight * wrong).masked_fill(unseen, 0) @ v.abs()
            error += (weight * wrong).masked_fill(unseen, 0).sum(-1, keepdim=True) * magnitude
            exact[rows] = _by_token(weight @ v)
            allowed[rows] = _by_token(2.0**-10 * magnitude + tiny + error + 2.0**-24)
    return exact, allowed


def _by_token(values: torch.Tensor) -> torch.Tensor:
    """[key heads, query heads per key head, tokens, size] as [tokens, query heads, size]."""
    return values.permute(2, 0, 1, 3).flatten(1, 2)
