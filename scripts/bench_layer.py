"""Times a decoding step's GEMMs with the small kernels before them on the GPU at hand; the result is JSON.

    python -m scripts.bench_layer --output docs/results/NAME.json [--library build/cuda-90-90/libvoltserve_cuda.so]

A CUDA graph runs norm, qkv, o, norm, gate_up, silu_and_mul and down of Qwen3-32B, over more layers than any L2 holds.
Times are medians of replays. Rotation and attention are left out. Code for 9.0 and later has early launches
(kernels/cuda/common/dependent.cuh); code for 8.0 (build/cuda-80-90) has none.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from kernels.tools.native import LIBRARY
from trials.layer_times import TURNS, Layers


def main() -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = []
    for ranks in ("TP1", "TP2"):
        layers = Layers(arguments.library, ranks)
        for m in arguments.tokens:
            for turn in range(TURNS):
                rows.append(layers.measure(m, turn))
                print(*rows[-1].values(), flush=True)
    result = {
        "what": "a layer's products and the small kernels before them, in a row",
        "provenance": "measured",
        "device": torch.cuda.get_device_name(),
        "library": str(arguments.library),
        "command": " ".join(sys.argv),
        "rows": rows,
        "seconds": round(time.monotonic() - began, 1),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
