"""Times decoding attention on the GPU at hand and writes the result as JSON.

    python -m scripts.bench_attention [--vllm FOLDER] [--library FILE] --output docs/results/NAME.json

A time is the median of a CUDA graph's replays. Launches rotate through enough caches that none is in L2. Yardsticks are
measured in the same run: a kernel that only reads and, with --vllm (its package folder), vLLM's Triton backend. Prefill
is not timed, because mma.m8n8k4 is emulated on GPUs after Volta.
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
from kernels.tools.native import LIBRARY, Library
from kernels.tools.native_attention import AttentionLibrary
from kernels.tools.timing import ceilings
from perfmodel.shapes import ATTENTION, BATCHES, SKEWED
from trials.attention_times import measure


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
