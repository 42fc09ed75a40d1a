"""Times decoding attention on the GPU at hand and writes the result as JSON.

    python -m scripts.bench_attention [--vllm FOLDER] [--library FILE] --output docs/results/NAME.json

Launches in a CUDA graph, median of replays, rotated through enough caches that none is in L2. The yardsticks are
measured in the same run: reading (a kernel that does nothing else) and, with --vllm (its package folder), vLLM's Triton
backend, compiled for the GPU at hand. Prefill is not timed: mma.m8n8k4 is emulated on GPUs after Volta.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.tools import triton_peer
from kernels.tools.attention_reference import paged_attention, random_batch
from kernels.tools.native import LIBRARY, Library
from kernels.tools.native_attention import AttentionLibrary
from kernels.tools.timing import ceilings, seconds
from perfmodel.shapes import ATTENTION, BATCHES, SKEWED

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


def main() -> None:
    """Measures, prints a table, writes the JSON after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--vllm", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    native = AttentionLibrary(arguments.library)
    triton = triton_peer.load(arguments.vllm) if arguments.vllm else None
    read = ceilings(Library(arguments.library))["read"]
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "time of decoding attention",
        "provenance": "measured",
        "device": torch.cuda.get_device_name(),
        "command": " ".join(sys.argv),
        "read_gb_s": round(read / 1e9, 1),
        "rows": rows,
    }
    print(f"read {result['read_gb_s']} GB/s", flush=True)
    for name, *heads in ATTENTION:
        batches = [(new, [total] * requests) for requests, new, total in BATCHES]
        for new, positions in [*batches, (1, list(SKEWED))]:
            row = measure(native, triton, name, (heads[0], heads[1], heads[2]), new, positions, read)
            rows.append(row)
            beside = f", Triton {row['triton_us']} us {row['triton_of_read']:.0%}" if triton else ""
            print(
                f"{name:18} {len(positions):3} x {new} new, {str(row['positions'])[:20]:>8}: {row['us']:8} us "
                f"{row['of_read']:.0%} of read{beside}",
                flush=True,
            )
            result["seconds"] = round(time.monotonic() - began, 1)
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
