#!/usr/bin/env python3
"""Times what reading ahead (kernels/cuda/ahead.h) brings on the GPU at hand, in one run, and writes the result as JSON.

    python scripts/bench_ahead.py --output docs/results/NAME.json [--library build/cuda/libvoltserve_cuda.so]

A decoding step's pairs of a small kernel and a product, silu_and_mul and nvfp4_linear, in a CUDA graph, over as many
weights as no L2 keeps; the small kernel reads the first 0, 1, 2 ... stages of every block of the product ahead. And the
four products of a layer in a row, of several layers. Medians of replays.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.tools.native import LIBRARY, Ahead, Library, Packed
from scripts.bench_gpu import GROUP, SHAPES, ceilings, copies, empty_launch, seconds

STAGE_BYTES = 8 * 1152  # of a block (ahead.h)
EVERYTHING = 1 << 40
Launch = Callable[[], Any]


class Pair:
    """A small kernel and the product that reads its result."""

    def __init__(self, library: Library, m: int, w: Packed) -> None:
        self.library, self.m, self.w = library, m, w
        self.wide = torch.randn(m, 2 * w.k, device="cuda").half()
        self.x = torch.empty(m, w.k, dtype=torch.float16, device="cuda")
        self.y = torch.empty(m, w.n, dtype=torch.float16, device="cuda")
        self.product: Launch = library.linear(self.x, w, self.y)

    def ahead(self, size: int) -> Ahead:
        """About `size` bytes of the product's weights."""
        device = torch.cuda.get_device_properties(0)
        arch = device.major * 10 + device.minor
        return self.library.read_ahead(
            size, self.m, self.w.n, self.w.k, GROUP, arch, device.multi_processor_count, self.w
        )

    def small(self, size: int) -> Launch:
        """The small kernel, reading `size` bytes ahead."""
        return partial(self.library.silu_and_mul, self.wide, self.x, self.ahead(size))


def depth_bytes(pair: Pair, depth: int) -> int:
    """Bytes of `depth` stages of every block."""
    return depth * pair.ahead(EVERYTHING).blocks * STAGE_BYTES


def each_product(library: Library, name: str, n: int, k: int, m: int, depths: list[int]) -> list[dict[str, Any]]:
    """A row for each depth: both kernels in turn, and the small one alone."""
    pairs = [Pair(library, m, w) for w in copies(library, n, k)]
    alone = seconds([pair.product for pair in pairs])
    rows: list[dict[str, Any]] = []
    for depth in depths:
        size = depth_bytes(pairs[0], depth)
        small = [pair.small(size) for pair in pairs]
        both = seconds([launch for s, pair in zip(small, pairs, strict=True) for launch in (s, pair.product)]) * 2
        row = {
            "layer": name, "n": n, "k": k, "m": m, "depth": depth, "megabytes": round(size / 1e6, 2),
            "pair_us": round(both * 1e6, 2), "small_alone_us": round(seconds(small) * 1e6, 2),
            "product_alone_us": round(alone * 1e6, 2),
        }  # fmt: skip
        rows.append({**row, "saved_us": round((rows[0]["pair_us"] if rows else row["pair_us"]) - row["pair_us"], 2)})
        print(*rows[-1].values(), flush=True)
        if size >= n * k * 9 // 16:
            break
    return rows


def whole_layers(library: Library, ranks: str, m: int, targets: list[int]) -> list[dict[str, Any]]:
    """Rows of the time of a layer's four pairs, each reading about as many bytes ahead as `targets` says."""
    weights = [copies(library, n, k) for name, n, k in SHAPES if name.startswith(f"Qwen3-32B {ranks}")]
    layers = min(len(w) for w in weights)
    pairs = [Pair(library, m, w[layer]) for layer in range(layers) for w in weights]
    rows: list[dict[str, Any]] = []
    for target in targets:
        launches = [launch for pair in pairs for launch in (pair.small(target), pair.product)]
        taken = seconds(launches) * len(launches) / layers
        row = {"model": f"Qwen3-32B {ranks}", "m": m, "layers": layers, "megabytes_asked": round(target / 1e6, 2)}
        rows.append({**row, "layer_us": round(taken * 1e6, 2)})
        rows[-1]["saved_us"] = round(rows[0]["layer_us"] - rows[-1]["layer_us"], 2)
        print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    began = time.monotonic()
    library = Library(arguments.library)
    result: dict[str, Any] = {
        "what": "time of a small kernel that reads ahead and the product after it",
        "provenance": "measured",
        "device": torch.cuda.get_device_name(),
        "command": " ".join(sys.argv),
        "read_gb_s": round(ceilings(library)["read"] / 1e9, 1),
        "empty_launch_us": round(empty_launch(library) * 1e6, 2),
        "products": [],
        "layers": [],
    }

    def keep() -> None:  # what there is, should time run out
        result["seconds"] = round(time.monotonic() - began, 1)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")

    targets = [size << 20 for size in (0, 3, 6, 9, 12, 16, 24)]
    for ranks in ("TP1", "TP2"):
        for m in arguments.tokens:
            result["layers"] += whole_layers(library, ranks, m, targets)
        keep()
    for name, n, k in (shape for shape in SHAPES if shape[0].startswith("Qwen3-32B")):
        for m in arguments.tokens:
            result["products"] += each_product(library, name, n, k, m, arguments.depths)
        keep()


if __name__ == "__main__":
    main()
