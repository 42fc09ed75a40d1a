"""Checks FP8 weights on the GPU at hand against float64: packing, products, fp16 copies, and torch.ops.voltserve.fp8_*.

    python -m kernels.tools.gpu_check_fp8 [--ops PATH/ops.so] --library PATH --output docs/results/NAME.json

One scale per row is exact in fp32. With blocks of 128 columns a weight is rounded to fp16 twice (common/layout8.cuh).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from kernels.tools.findings import Findings, parser
from kernels.tools.native import LIBRARY, Library
from kernels.tools.reference import E4M3_NUMBERS, random_activations, worst_error

ROWS, BLOCKS, BLOCK = 0, 128, 128
SHAPES = ((5120, 5120), (8240, 2048), (1001, 576), (1024, 17408), (48, 5120), (33, 16), (130, 80), (300, 1040))
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 200, 448, 449, 1024)
VARIANTS = ("mma4", "mma8", "mma16", "mma32", "mma64")
# Two roundings to fp16 of each weight, in units of worst_error's 1e-5 of sum |x w|.
ALLOWANCE = {ROWS: 1, BLOCKS: 98}
DENSE_ALLOWANCE = 98


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.native = library
        self.random = torch.Generator("cuda").manual_seed(19)

    def weights(self, n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (every number of E4M3), scales over three orders of magnitude, and the matrix in float64."""
        numbers = torch.tensor(E4M3_NUMBERS, dtype=torch.uint8, device="cuda")
        codes = numbers[torch.randint(0, len(numbers), (n, k), device="cuda", generator=self.random)]
        groups = -(-k // BLOCK) if group else 1
        scales = 10 ** (3 * torch.rand(n, groups, device="cuda", generator=self.random) - 7)
        if group:
            scales[0, 0] = 0
        spread = scales.double().repeat_interleave(BLOCK if group else k, dim=1)[:, :k]
        return codes, scales, codes.view(torch.float8_e4m3fn).double() * spread

    def products(self, n: int, k: int, group: int) -> None:
        """Every variant, and what the plan chooses; guards around y, and equal bits on a second run."""
        codes, scales, exact = self.weights(n, k, group)
        packed = self.native.pack_fp8(codes, scales, group)
        numbers = self.native.variants()
        cases: list[tuple[int, dict[str, Any]]] = [(m, {}) for m in TOKENS]
        for name in VARIANTS:
            tokens = self.native.shape_of(name).tokens
            cases += [(m, {"variant": numbers[name], "blocks": b}) for m, b in ((tokens, 1), (2 * tokens + 1, 37))]
        for m, choice in cases:
            if not choice and self.native.plan(m, n, k, group).path != "fused":
                continue
            x = random_activations(m, k + 16, self.random)[:, 8 : 8 + k]
            bias = torch.randn(n, device="cuda", generator=self.random).half() if m % 2 else None
            buffer = torch.full((m * n + 129,), torch.nan, dtype=torch.float16, device="cuda")
            y = buffer[65 : 65 + m * n].view(m, n)
            launch = self.native.linear(x, packed, y, bias, **choice)
            launch()
            torch.cuda.synchronize()
            what = f"M={m} N={n} K={k} g={group} {choice}"
            error, detail = worst_error(y, x, exact, bias)
            self.within(f"{launch.shape.name} g={group}", what, error / ALLOWANCE[group], detail)
            if not (buffer[:65].isnan().all() and buffer[65 + m * n :].isnan().all()):
                self.failures.append(f"{what}: wrote outside its output")
            first = y.clone()
            launch()
            self.expect("same bits", what, torch.equal(y.view(torch.int16), first.view(torch.int16)))

    def copies(self, n: int, k: int, group: int) -> None:
        """fp16 copies, whole and from a later row on."""
        codes, scales, exact = self.weights(n, k, group)
        packed = self.native.pack_fp8(codes, scales, group)
        for first in (0, n // 64 * 32):
            out = torch.full((n - first, k), torch.nan, dtype=torch.float16, device="cuda")
            self.native.dequantize(packed, out, first)
            expected = exact[first:]
            roundings = 2 if group else 1
            allowed = expected.abs() * 2.0**-11 * 1.001 * roundings + 2.0**-25
            what = f"N={n} K={k} g={group} from row {first}"
            self.all_within(f"dequantize g={group}", what, (out.double() - expected).abs() / allowed)

    def every_code(self) -> None:
        """All 254 numbers, copied with scale 1: equal, -0 and subnormals included."""
        codes = torch.tensor([*E4M3_NUMBERS, 0, 0], dtype=torch.uint8, device="cuda").repeat(33, 1)
        packed = self.native.pack_fp8(codes, torch.ones(33, 1, device="cuda"), ROWS)
        out = torch.empty(33, 256, dtype=torch.float16, device="cuda")
        self.native.dequantize(packed, out)
        self.expect("every code", "33 rows", torch.equal(out, codes.view(torch.float8_e4m3fn).half()))
        codes[32, 255] = 0xFF
        try:
            self.native.pack_fp8(codes, torch.ones(33, 1, device="cuda"), ROWS)
            self.expect("NaN", "raised nothing", False)
        except ValueError as error:
            self.expect("NaN", str(error), "row 32" in str(error))

    def operators(self) -> None:
        """torch.ops.voltserve.fp8_*: shapes, the path through cuBLAS, a graph, errors."""
        ops: Any = torch.ops.voltserve
        for n, k, group in ((1000, 576, ROWS), (1000, 576, BLOCKS), (33, 80, BLOCKS), (512, 128, ROWS)):
            codes, scales, exact = self.weights(n, k, group)
            size = BLOCK if group else k
            packed, packed_scales = ops.fp8_pack(codes.view(torch.float8_e4m3fn), scales, size)
            for m in (1, 4, 33, 449, 2048):
                x = random_activations(m, k, self.random)
                bias = torch.randn(n, device="cuda", generator=self.random).half()
                y = ops.fp8_linear(x, packed, packed_scales, n, size, bias)
                error, detail = worst_error(y, x, exact, bias)
                self.within("fp8_linear", f"{n}x{k} g={size} M={m}", error / DENSE_ALLOWANCE, detail)
            x = random_activations(4, k, self.random)
            expected = ops.fp8_linear(x, packed, packed_scales, n, size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = ops.fp8_linear(x, packed, packed_scales, n, size)
            y.fill_(torch.nan)
            graph.replay()
            self.expect("graph", f"{n}x{k} g={size}: other bits", torch.equal(y, expected))
            shaped = ops.fp8_linear(x.view(2, 2, k), packed, packed_scales, n, size)
            self.expect("shape", f"{tuple(shaped.shape)}", torch.equal(shaped.view(4, n), expected))
            dense = ops.fp8_dequantize(packed, packed_scales, n, k, size, torch.float16).double()
            allowed = exact.abs() * 2.0**-10 * 1.001 + 2.0**-25
            self.all_within("fp8_dequantize", f"{n}x{k} g={size}", (dense - exact).abs() / allowed)
        codes[3, 5] = 0x7F
        try:
            ops.fp8_pack(codes.view(torch.float8_e4m3fn), scales, size)
            self.expect("NaN in the operator", "raised nothing", False)
        except RuntimeError as error:
            self.expect("NaN in the operator", str(error).splitlines()[0], "NaN in row 3" in str(error))


def main() -> int:
    """Returns 0 if every case passed."""
    options = parser(__doc__)
    options.add_argument("--library", type=Path, default=LIBRARY)
    options.add_argument("--ops", type=Path, help="ops.so; without it only the launchers are checked")
    arguments = options.parse_args()
    checker = Checker(Library(arguments.library))
    checker.every_code()
    for n, k in SHAPES:
        for group in (ROWS, BLOCKS):
            checker.copies(n, k, group)
            checker.products(n, k, group)
    if arguments.ops:
        torch.ops.load_library(str(arguments.ops))
        checker.operators()
    what = "correctness of FP8 weights against float64"
    return checker.finish(what, arguments.output, library=str(arguments.library))


if __name__ == "__main__":
    sys.exit(main())
