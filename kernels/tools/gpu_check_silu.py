"""Checks silu_and_mul (kernels/cuda/silu/silu_and_mul.cuh) on the GPU at hand against float64.

python -m kernels.tools.gpu_check_silu --library build/cuda/libvoltserve_cuda.so --output docs/results/NAME.json

It covers rounding to fp16, extremes, and results beyond fp16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kernels.tools.c_structs import filled
from kernels.tools.findings import Findings, parser
from kernels.tools.native import LIBRARY, Launchers

# Gate and product are each rounded to fp16: by half a unit in the last place, also of the smallest numbers.
RELATIVE, SMALLEST = 2.0**-10, 2.0**-24
LARGEST = 65504
GATES = (0.0, -0.0, 1e-4, -1e-4, 6e-8, -5.5, 11.0, -11.0, 88.0, -88.0, 3000.0, -3000.0, LARGEST, -LARGEST)


class Checker(Findings):
    """What the checks share."""

    def __init__(self, library: Launchers) -> None:
        super().__init__()
        self.library = library
        self.random = torch.Generator("cuda").manual_seed(5)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """The kernel's result, in memory that was NaN."""
        y = torch.full((x.shape[0], x.shape[1] // 2), torch.nan, dtype=torch.float16, device="cuda")
        self.library.launch("silu_and_mul", filled("SiluArgs", x=x, y=y, m=y.shape[0], n=y.shape[1]))
        return y

    def exact(self, what: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compares with float64; where that is beyond fp16, the result must be infinite."""
        gate, up = x.double().chunk(2, dim=1)
        exact = gate * torch.sigmoid(gate) * up
        allowed = RELATIVE * exact.abs() + SMALLEST * (1 + up.abs())
        inside = exact.abs() + allowed < LARGEST
        self.all_within("silu_and_mul", what, torch.where(inside, (y.double() - exact).abs() / allowed, 0))
        outside = exact.abs() - allowed > LARGEST + 16  # which rounds to infinity
        self.expect("overflow", what, bool(((y == torch.inf * exact.sign()) | ~outside).all()))


def shapes(c: Checker) -> None:
    """From one chunk to the tokens of a prompt, with numbers of all sizes."""
    for m in (1, 2, 5, 16, 33, 1000):
        for n in (8, 520, 4864, 12800, 25600):
            x = torch.randn(m, 2 * n, device="cuda", generator=c.random)
            x *= torch.exp2(torch.randint(-16, 6, x.shape, device="cuda", generator=c.random))
            c.exact(f"m={m} n={n}", x.half(), c.gate(x.half()))
    gates = torch.tensor(GATES, device="cuda").half()
    ups = torch.cat([gates, torch.tensor([1.0, 2.0], device="cuda").half()])
    x = torch.cat([gates[:, None].expand(-1, len(ups)), ups.expand(len(gates), -1)], dim=1).contiguous()
    c.exact("extremes", x, c.gate(x))


def main() -> int:
    """Returns 0 if every check passed."""
    options = parser(__doc__)
    options.add_argument("--library", type=Path, default=LIBRARY)
    arguments = options.parse_args()
    checker = Checker(Launchers(arguments.library))
    shapes(checker)
    return checker.finish("silu_and_mul against float64", arguments.output)


if __name__ == "__main__":
    sys.exit(main())
