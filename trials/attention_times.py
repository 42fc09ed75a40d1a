"""The time of decoding attention, beside vLLM's Triton backend and reading alone."""

from __future__ import annotations

from typing import Any

import torch

from kernels.tools import triton_peer
from kernels.tools.attention_reference import paged_attention, random_batch
from kernels.tools.native_attention import AttentionLibrary
from kernels.tools.timing import seconds

BLOCK_SIZE = 16
ROTATED_BYTES = 200 << 20


def measure(
    native: AttentionLibrary, triton: Any, name: str, heads: tuple[int, int, int], new: int, positions: list[int],
    read: float,
) -> dict[str, Any]:  # fmt: skip
    """One row: our time, Triton's, and what both are of reading the cache once."""
    q_heads, kv_heads, head_dim = heads
    size = 4 * sum(positions) * kv_heads * head_dim
    generator = torch.Generator("cuda").manual_seed(3)
    lengths = [(new, total) for total in positions]
    scale = head_dim**-0.5
    ours, theirs, batches = [], [], []
    for _ in range(min(32, 1 + ROTATED_BYTES // size)):
        b = random_batch(lengths, q_heads, kv_heads, head_dim, BLOCK_SIZE, generator)
        known = (b.block_table, b.query_start, b.seq_lens)
        out = torch.empty_like(b.q)
        ours.append(native.attention(b.q, b.k_cache, b.v_cache, *known, new, new, out, scale))
        if triton is not None:
            keys, values = (cache.nan_to_num_(0.0) for cache in (b.k_cache, b.v_cache))
            table = b.block_table.clamp(max=keys.shape[0] - 1)
            known = (table, b.query_start, b.seq_lens)
            other = torch.empty_like(b.q)
            theirs.append(
                triton_peer.launcher(triton, b.q, keys, values, *known, new, max(positions), other, scale)
            )  # fmt: skip
        batches.append((b, out))
    time_ = seconds(ours)
    # A time counts only if the result was right.
    b, out = batches[0]
    exact, allowed = paged_attention(b.q, b.k_cache, b.v_cache, b.block_table, b.query_start, b.seq_lens, scale)
    if not bool(((out.double() - exact).abs() <= allowed).all()):
        raise ValueError(f"{name}: expected the exact result within its allowed error, got another")
    row = {
        "model": name, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "requests": len(positions),
        "new_tokens": new, "positions": positions if len(set(positions)) > 1 else positions[0],
        "cache_mb": round(size / 1e6, 1), "us": round(time_ * 1e6, 2), "of_read": round(size / time_ / read, 3),
    }  # fmt: skip
    if theirs:
        triton_time = seconds(theirs)
        row["triton_us"] = round(triton_time * 1e6, 2)
        row["triton_of_read"] = round(size / triton_time / read, 3)
    return row
