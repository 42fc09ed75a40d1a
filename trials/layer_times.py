"""The time of a layer's kernels in a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.tools.c_structs import filled
from kernels.tools.native import Library
from kernels.tools.native_norm import NormLibrary
from kernels.tools.timing import seconds
from perfmodel.shapes import LINEAR
from trials.gemm_times import copies

Launch = Callable[[], Any]
TURNS = 3
EPS = 1e-6


def layer(library: Library, norms: NormLibrary, m: int, weights: dict[str, Any]) -> list[tuple[str, Launch]]:
    """The launches of one layer, by name, each on its predecessor's result where the shapes allow it."""

    def halves(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").half()

    qkv, o, gate_up, down = (weights[name] for name in ("qkv", "o", "gate_up", "down"))
    hidden, residual, norm_weight, normed = halves(m, qkv.k), halves(m, qkv.k), halves(qkv.k), halves(m, qkv.k)
    wide, activated = halves(m, gate_up.n), halves(m, down.k)
    gate = filled("SiluArgs", x=wide, y=activated, m=m, n=down.k)  # the GEMMs beside it keep both tensors
    norm = norms.norm(hidden, residual, norm_weight, EPS, normed)
    return [
        ("norm", norm),
        ("qkv", library.linear(normed, qkv, halves(m, qkv.n))),
        ("o", library.linear(halves(m, o.k), o, hidden)),
        ("norm", norm),
        ("gate_up", library.linear(normed, gate_up, wide)),
        ("silu_and_mul", partial(library.launch, "silu_and_mul", gate)),
        ("down", library.linear(activated, down, hidden)),
    ]


class Layers:
    """Layers of one rank, whose weights are packed once."""

    def __init__(self, library: Path, ranks: str) -> None:
        self.native, self.norms, self.ranks = Library(library), NormLibrary(library), ranks
        named = {name.split()[-1]: (n, k) for name, n, k in LINEAR if name.startswith(f"Qwen3-32B {ranks}")}
        made = {name: copies(self.native, *shape) for name, shape in named.items()}
        count = min(len(weights) for weights in made.values())
        self.weights = [{name: weights[i] for name, weights in made.items()} for i in range(count)]

    def measure(self, m: int, turn: int) -> dict[str, Any]:
        """Microseconds of a layer's launches, and of each by itself, one after another of its kind."""
        layers = [layer(self.native, self.norms, m, weights) for weights in self.weights]
        together = seconds([launch for one in layers for _, launch in one]) * len(layers[0])
        alone = {
            name: round(1e6 * seconds([launch for one in layers for called, launch in one if called == name]), 2)
            for name in dict(layers[0])
        }
        return {
            "model": f"Qwen3-32B {self.ranks}", "m": m, "turn": turn,
            "layers": len(layers), "layer_us": round(1e6 * together, 2), "alone_us": alone,
        }  # fmt: skip
