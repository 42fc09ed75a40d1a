"""Checks rotate_and_cache on the GPU at hand against float64; writes the result as JSON.

    python -m kernels.tools.gpu_check_rotate [--quick] [--ops ops.so] --output docs/results/NAME.json

`--ops`: through torch.ops.voltserve, which this library of kernels/setup.py defines, instead of the launcher.
`--quick`: few and small cases, for compute-sanitizer. Query, key and value are parts of one tensor, as a GEMM leaves
them. Caches hold NaN wherever nothing is to be written, and nothing else may change.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.tools.findings import Findings, parser
from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import AttentionLibrary
from kernels.tools.rotation_reference import rotated_heads

HEADS = ((32, 4), (6, 2), (5, 1), (1, 1))
# (head size, rotated dimensions)
SIZES = ((64, 64), (80, 80), (96, 48), (128, 128), (128, 64), (128, 4), (256, 64), (256, 256), (8, 8))
TOKENS = (1, 3, 16, 77)
POSITIONS = 5000


@dataclass(frozen=True)
class Case:
    """A layer and a step of it."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    halves: bool
    norms: bool
    block_size: int = 16
    padding: int = 0  # tokens without a slot


def cases(quick: bool) -> Iterator[Case]:
    """All."""
    for (q_heads, kv_heads), (head_dim, rotated), halves, norms in itertools.product(
        HEADS[:2] if quick else HEADS, SIZES, (False, True), (False, True)
    ):
        for tokens in TOKENS[:2] if quick else TOKENS:
            yield Case(tokens, q_heads, kv_heads, head_dim, rotated, halves, norms, padding=tokens // 4)
    if not quick:
        for block_size in (8, 24, 784):
            yield Case(100, 8, 2, 128, 128, True, True, block_size)
        yield Case(5000, 32, 8, 128, 128, True, True)
        yield Case(5000, 9, 3, 64, 64, True, False)


class Ops:
    """torch.ops.voltserve with AttentionLibrary's method, so that the same cases check the binding."""

    def rotate_and_cache(self, *arguments: Any) -> None:
        """Calls the op."""
        torch.ops.voltserve.rotate_and_cache(*arguments)


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self, native: AttentionLibrary | Ops) -> None:
        super().__init__()
        self.native = native
        self.random = torch.Generator("cuda").manual_seed(7)

    def normal(self, *shape: int) -> torch.Tensor:
        """float16, one channel of 16 large."""
        x = torch.randn(shape, generator=self.random, device="cuda")
        x[..., 3::16] *= 20
        return x.half()

    def case(self, case: Case) -> None:
        """One step: errors within rounding, and the same bits again and in a graph."""
        widths = [count * case.head_dim for count in (case.q_heads, case.kv_heads, case.kv_heads)]
        made = self.normal(case.tokens, sum(widths) + 8)  # 8 that no token uses
        before = made.clone()
        q, key, value = (part.unflatten(1, (-1, case.head_dim)) for part in made[:, : sum(widths)].split(widths, 1))
        angles = torch.rand(POSITIONS, case.rotated // 2, generator=self.random, device="cuda") * 7
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1).half()
        positions = torch.randint(POSITIONS, (case.tokens,), generator=self.random, device="cuda")
        weights = [1 + self.normal(case.head_dim) / 4 if case.norms else None for _ in range(2)]
        blocks = -(-case.tokens // case.block_size) + 1
        shape = (blocks, 2, case.kv_heads, case.block_size, case.head_dim)
        cache = torch.full(shape, torch.nan, dtype=torch.float16, device="cuda")
        keys, values = cache.permute(0, 1, 3, 2, 4).unbind(1)
        free = torch.randperm(blocks * case.block_size, generator=self.random, device="cuda")
        slots = free[: case.tokens].clone()
        slots[1 : 1 + case.padding] = -1
        slots = slots[: max(1, case.tokens - case.padding)]  # the last tokens have none at all

        arguments = (q, key, value, positions, cos_sin, case.halves, *weights, 1e-6, keys, values, slots)
        known = (positions, cos_sin, case.halves)
        wanted = rotated_heads(q, *known, weights[0]), rotated_heads(key, *known, weights[1])
        self.native.rotate_and_cache(*arguments)
        torch.cuda.synchronize()
        kind = f"D={case.head_dim} {'halves' if case.halves else 'neighbours'} {'normed' if case.norms else 'as it is'}"
        self.all_within(f"q {kind}", str(case), (q.double() - wanted[0][0]).abs() / wanted[0][1].clamp(min=1e-30))
        written = slots[slots >= 0]
        seen, block, token = (slots >= 0).nonzero()[:, 0], written // case.block_size, written % case.block_size
        got = keys[block, token].double()
        self.all_within(f"k {kind}", str(case), (got - wanted[1][0][seen]).abs() / wanted[1][1][seen].clamp(min=1e-30))
        self.expect("v", f"{case}: changed", torch.equal(values[block, token], value[seen]))
        kept = cache.clone()
        for half in kept.permute(0, 1, 3, 2, 4).unbind(1):
            half[block, token] = torch.nan
        self.expect("cache", f"{case}: written where nothing belongs", bool(kept.isnan().all()))
        same = torch.equal(made[:, widths[0] :], before[:, widths[0] :])
        self.expect("inputs", f"{case}: key, value or their surroundings changed", same)
        self.again(case, arguments, made, before, cache)

    def again(self, case: Case, arguments: Any, made: torch.Tensor, before: torch.Tensor, cache: torch.Tensor) -> None:
        """The same bits, again and in a graph."""
        bits = [x.view(torch.int16).clone() for x in (made, cache)]

        def check(what: str) -> None:
            torch.cuda.synchronize()
            same = all(torch.equal(x.view(torch.int16), old) for x, old in zip((made, cache), bits, strict=True))
            self.expect("bits", f"{case}: others {what}", same)
            made.copy_(before)
            cache.fill_(torch.nan)

        made.copy_(before)
        cache.fill_(torch.nan)
        self.native.rotate_and_cache(*arguments)
        check("on a second run")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.native.rotate_and_cache(*arguments)
        graph.replay()
        check("in a graph")


def milliseconds(launch: Any, times: int = 200) -> float:
    """The time of one launch among many in a graph."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times


def timed(checker: Checker) -> list[dict[str, Any]]:
    """µs per launch in a graph for Qwen3-32B's heads, on one GPU and on one of two."""
    rows = []
    for (q_heads, kv_heads), tokens in itertools.product(((64, 8), (32, 4)), (1, 8, 32, 2048)):
        made = checker.normal(tokens, (q_heads + 2 * kv_heads) * 128)
        q, key, value = (
            x.unflatten(1, (-1, 128)) for x in made.split([q_heads * 128, kv_heads * 128, kv_heads * 128], 1)
        )
        cache = torch.zeros(tokens, 2, kv_heads, 16, 128, dtype=torch.float16, device="cuda")
        keys, values = cache.permute(0, 1, 3, 2, 4).unbind(1)
        weight = torch.ones(128, dtype=torch.float16, device="cuda")
        positions = torch.arange(tokens, device="cuda")
        cos_sin = torch.ones(tokens, 128, dtype=torch.float16, device="cuda")
        arguments = (q, key, value, positions, cos_sin, True, weight, weight, 1e-6, keys, values, positions * 16)
        time_us = 1e3 * milliseconds(lambda arguments=arguments: checker.native.rotate_and_cache(*arguments))
        rows.append({"q_heads": q_heads, "kv_heads": kv_heads, "tokens": tokens, "microseconds": round(time_us, 2)})
    return rows


def main() -> int:
    """Returns 0 if every case passed."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--library", type=Path, default=LIBRARY)
    options.add_argument("--ops", type=Path)
    arguments = options.parse_args()
    if arguments.ops:
        torch.ops.load_library(arguments.ops)
    checker = Checker(Ops() if arguments.ops else AttentionLibrary(arguments.library))
    began = time.monotonic()
    for case in cases(arguments.quick):
        checker.case(case)
    print(f"{checker.cases} cases in {time.monotonic() - began:.1f} s", flush=True)
    times = [] if arguments.quick else timed(checker)
    what = f"correctness of rotate_and_cache's {'op' if arguments.ops else 'kernel'} against float64, and its time"
    return checker.finish(what, arguments.output, library=str(arguments.ops or arguments.library), times=times)


if __name__ == "__main__":
    sys.exit(main())
