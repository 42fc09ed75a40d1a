"""Checks the CUDA kernels on the GPU at hand against float64 and writes the result as JSON.

    python -m kernels.tools.gpu_check [--quick] --output docs/results/NAME.json

`--quick`: few and small cases, for compute-sanitizer. Outputs are filled with NaN before each launch, and the memory
around them must not change.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from kernels.tools.findings import Findings, parser
from kernels.tools.native import LIBRARY, Library, Packed
from kernels.tools.reference import Canonical, random_activations, random_weights, worst_error

GUARD = 64  # elements of poison before and after an output
SHAPES = ((5120, 5120), (8240, 2048), (1001, 576), (5120, 25600), (48, 5120), (33, 16), (130, 80))
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 200, 1024, 4096)


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.native = library
        self.random = torch.Generator("cuda").manual_seed(7)

    def guarded(self, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer, view [m, n] at an odd element), all NaN."""
        buffer = torch.full((m * n + 2 * GUARD + 1,), torch.nan, dtype=torch.float16, device="cuda")
        return buffer, buffer[GUARD + 1 : GUARD + 1 + m * n].view(m, n)

    def intact(self, kind: str, what: str, buffer: torch.Tensor) -> None:
        """Fails the case if the guards were written."""
        if not (buffer[: GUARD + 1].isnan().all() and buffer[-GUARD:].isnan().all()):
            self.failures.append(f"{kind} {what}: wrote outside its output")

    def linear(
        self, w: Canonical, packed: Packed, exact: torch.Tensor, m: int, adversarial: bool, **choice: Any
    ) -> None:
        """One GEMM. x is a view with a wider row stride that starts in the middle of its buffer."""
        wide = random_activations(m, packed.k + 16, self.random, adversarial)
        x = wide[:, 8 : 8 + packed.k]
        bias = torch.randn(packed.n, device="cuda", generator=self.random).half() if m % 2 else None
        buffer, y = self.guarded(m, packed.n)
        launch = self.native.linear(x, packed, y, bias, **choice)
        name = launch.shape.name
        launch()
        torch.cuda.synchronize()
        what = f"M={m} N={packed.n} K={packed.k} g={w.group} blocks={launch.plan.blocks} adversarial={adversarial}"
        self.within(name, what, *worst_error(y, x, exact, bias))
        self.intact(name, what, buffer)
        first = y.clone()
        for _ in range(3):
            y.fill_(torch.nan)
            launch()
            if not torch.equal(y.view(torch.int16), first.view(torch.int16)):
                self.failures.append(f"{name} {what}: other bits on a second run")
                break

    def dequantize(self, w: Canonical, packed: Packed, exact: torch.Tensor) -> None:
        """The whole matrix and a slice of rows: exact up to the one rounding to fp16."""
        for first, rows in ((0, packed.n), (packed.n // 64 * 32, packed.n - packed.n // 64 * 32)):
            buffer = torch.full((rows * packed.k + 2 * GUARD,), torch.nan, dtype=torch.float16, device="cuda")
            out = buffer[GUARD:-GUARD].view(rows, packed.k)
            self.native.dequantize(packed, out, first)
            expected = exact[first : first + rows]
            allowed = expected.abs() * 2.0**-11 * 1.001 + 2.0**-25
            what = f"N={packed.n} K={packed.k} g={w.group} rows {first}+{rows}"
            self.all_within("dequantize", what, (out.double() - expected).abs() / allowed)
            if not (buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()):
                self.failures.append(f"dequantize {what}: wrote outside its output")

    def grouped(self, n: int, k: int, group: int, experts: int, tokens: int, top_k: int) -> None:
        """Mixture of experts: random routing, aligned to the block as vLLM's moe_align_block_size does."""
        members = [random_weights(n, k, group, self.random) for _ in range(experts)]
        parts = [self.native.pack(w.codes, w.scales, w.row_factor, group) for w in members]
        packed = Packed(
            torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]),
            torch.cat([p.row_factor for p in parts]), n, k, group, experts,
        )  # fmt: skip
        x = random_activations(tokens, k, self.random)
        routes = torch.rand(tokens, experts, device="cuda", generator=self.random).topk(top_k).indices
        for variant in ("mma8", "mma16", "mma32", "mma64"):
            number = self.native.variants()[variant]
            block = self.native.shape_of(variant).tokens
            slots, block_experts = align(routes, experts, block)
            buffer, y = self.guarded(tokens * top_k, n)
            padded = torch.tensor([len(slots)], dtype=torch.int32, device="cuda")
            # As in vLLM, the arrays are longer than their used part.
            slots = torch.nn.functional.pad(slots, (0, 2 * block), value=tokens * top_k)
            block_experts = torch.nn.functional.pad(block_experts, (0, 2))
            for blocks in (1, 53):
                self.native.linear(x, packed, y, None, number, blocks, (slots, block_experts, padded, top_k))()
                torch.cuda.synchronize()
                for expert in range(experts):
                    token, choice = (routes == expert).nonzero(as_tuple=True)
                    if len(token):
                        what = f"E={experts} M={tokens} top_k={top_k} N={n} K={k} blocks={blocks}"
                        error = worst_error(y[token * top_k + choice], x[token], members[expert].double())
                        self.within(f"grouped {variant}", what, *error)
                self.intact(f"grouped {variant}", f"N={n}", buffer)


def align(routes: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot ids by expert, padded per expert to whole blocks with the slot count; the expert of each block)."""
    flat = routes.flatten()
    slots, owners = [], []
    for expert in range(experts):
        ids = (flat == expert).nonzero().flatten()
        blocks = -(-len(ids) // block)
        slots.append(torch.nn.functional.pad(ids, (0, blocks * block - len(ids)), value=flat.numel()))
        owners += [expert] * blocks
    return torch.cat(slots).int(), torch.tensor(owners, dtype=torch.int32, device=routes.device)


def repeats(checker: Checker, count: int) -> None:
    """Every variant gives the same bits `count` times over, shared tiles included."""
    w = random_weights(1024, 4096, 16, checker.random)
    packed = checker.native.pack(w.codes, w.scales, w.row_factor, 16)
    for name, number in checker.native.variants().items():
        m = checker.native.shape_of(name).tokens
        x = random_activations(m, 4096, checker.random)
        y = torch.empty(m, 1024, dtype=torch.float16, device="cuda")
        launch = checker.native.linear(x, packed, y, None, number, 300)
        launch()
        first = y.clone()
        for i in range(count):
            y.fill_(torch.nan)
            launch()
            if not torch.equal(y.view(torch.int16), first.view(torch.int16)):
                checker.failures.append(f"{name}: other bits at repeat {i}")
                break


def main() -> int:
    """Returns 0 if every case passed."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--library", type=Path, default=LIBRARY)
    arguments = options.parse_args()
    checker = Checker(Library(arguments.library))
    shapes = ((130, 576), (33, 16)) if arguments.quick else SHAPES
    for (n, k), group in itertools.product(shapes, (16, 32)):
        if k % group:
            continue
        for adversarial in (False, True):
            w = random_weights(n, k, group, checker.random, adversarial)
            packed = checker.native.pack(w.codes, w.scales, w.row_factor, group)
            exact = w.double()
            checker.dequantize(w, packed, exact)
            for name, number in checker.native.variants().items():
                tokens = checker.native.shape_of(name).tokens
                for m, blocks in ((tokens, 1), (2 * tokens + 1, 37)):
                    if arguments.quick or k <= 8192 or tokens <= 16:
                        checker.linear(w, packed, exact, m, adversarial, variant=number, blocks=blocks)
            for m in () if arguments.quick else TOKENS:
                if m <= 1024 and k <= 8192:
                    checker.linear(w, packed, exact, m, adversarial)
    checker.grouped(130, 192, 16, 4, 9, 2)
    if not arguments.quick:
        checker.grouped(768, 2048, 16, 32, 100, 4)
        checker.grouped(768, 2048, 32, 32, 7, 8)
        repeats(checker, 100)
    what = "correctness of the CUDA kernels against float64"
    return checker.finish(what, arguments.output, library=str(arguments.library))


if __name__ == "__main__":
    sys.exit(main())
