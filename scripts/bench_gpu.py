"""Times the CUDA kernels on the GPU at hand, in one run, and writes the result as JSON.

    python -m scripts.bench_gpu --output docs/results/NAME.json [--library build/cuda/libvoltserve_cuda.so] [--vllm DIR]

A time is the median of a CUDA graph's replays. Launches rotate through enough copies of a weight that none is in L2.
Yardsticks are measured in the same run:

    kernels that only read, or only copy; one that reads as many bytes as one weight has
    an empty launch; floor_us is its time and that of the weight at the read ceiling
    dequantizing to fp16 and cuBLAS on every call, and cuBLAS on fp16 weights
    public int4 kernels (kernels/tools/int4_peers.py)

After Volta the kernels multiply by other instructions than on a V100, and plan.h gives them at most 32 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.tools import int4_peers
from kernels.tools.native import LIBRARY, Library
from kernels.tools.timing import ceilings
from perfmodel.shapes import LINEAR
from trials.gemm_times import Peers, empty_launch, measure, memory_side


def main() -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--vllm", type=Path, help="vLLM's package folder, to time its AWQ kernel too")
    arguments = parser.parse_args()
    began = time.monotonic()
    library = Library(arguments.library)
    limits = ceilings(library)
    peers: Peers = {"tinygemm_int4": int4_peers.tinygemm}
    if arguments.vllm:
        peers["vllm_awq_triton"] = int4_peers.awq(arguments.vllm)
    empty = empty_launch(library)
    result: dict[str, Any] = {
        "what": "time of the CUDA kernels",
        "provenance": "measured",
        "device": torch.cuda.get_device_name(),
        "library": str(arguments.library),
        "command": " ".join(sys.argv),
        "read_gb_s": round(limits["read"] / 1e9, 1),
        "copy_gb_s": round(limits["copy"] / 1e9, 1),
        "empty_launch_us": round(empty * 1e6, 2),
        "rows": [],
        "memory_side": [],
    }
    print(", ".join(f"{key} {result[key]}" for key in ("read_gb_s", "copy_gb_s", "empty_launch_us")), flush=True)
    for name, n, k in LINEAR:
        for row in measure(library, name, n, k, arguments.tokens, limits["read"], empty, peers):
            result["rows"].append(row)
            print(
                f"{name:26} {n:6}x{k:<6} M={row['m']:<3} {row['variant']:5} blocks={row['blocks']:<4} {row['us']:8} us "
                f"{row['of_read']:.0%} of read, {row['speedup_over_it']}x dequantize+cuBLAS, "
                f"{row['speedup_over_fp16']}x fp16, "
                f"{', '.join(peer + ' ' + str(row[peer + '_us']) + ' us' for peer in peers)}, "
                f"dequantize {row['dequantize_gb_s'] / result['copy_gb_s']:.0%} of copy",
                flush=True,
            )
    for name, n, k in LINEAR:
        for row in memory_side(library, name, n, k, limits["read"]):
            result["memory_side"].append(row)
            print(
                f"{name:26} memory side of {row['variant']}: {row['us']:8} us {row['of_read']:.0%} of read", flush=True
            )
    result["seconds"] = round(time.monotonic() - began, 1)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
