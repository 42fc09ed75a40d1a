"""Checks the plain norm and rotation (kernels/cuda/plain/plain.cuh) on the GPU at hand.

python -m kernels.tools.gpu_check_plain --library build/cuda/libvoltserve_cuda.so --output docs/results/NAME.json

The norm is held against float64, and its residual against the bits of PyTorch's addition. The rotation has to have the
bits of PyTorch's half-precision operations, one after another, which is how vLLM's kernel rounds. Memory around
results, and dimensions that are not rotated, must not change. With --ops the operators' argument checks and results.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.tools.findings import Findings, parser
from kernels.tools.native import LIBRARY
from kernels.tools.native_plain import PlainLibrary

EPS = 1e-6
WIDTHS = (8, 64, 72, 128, 256, 576, 2048, 5120, 8192, 8200, 16_384)
ROWS = (1, 2, 7, 64, 1000)
GUARD = 64  # elements of poison before and after y
# y is rounded twice, relative to itself or, where it is small, by half of float16's smallest step.
RELATIVE, SMALLEST = 2.0**-10 * 1.01, 2.0**-24
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "usual": lambda x: x,
    "large": lambda x: x * 1000,
    "tiny": lambda x: x * 2.0**-16,
    "one outlier": lambda x: torch.where(torch.arange(x.shape[-1], device=x.device) == x.shape[-1] - 1, 30_000.0, x),
    "zeros": torch.zeros_like,
}
# (head size, how much of it is rotated)
ROTATED = ((64, 64), (64, 32), (80, 80), (128, 128), (128, 64), (256, 64), (512, 512), (512, 128), (96, 6))
POSITIONS = 40_000


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self, library: Path) -> None:
        super().__init__()
        self.native = PlainLibrary(library)
        self.random = torch.Generator("cuda").manual_seed(13)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Normally distributed float16."""
        return torch.randn(*shape, device="cuda", generator=self.random).half()

    def norm(self, tokens: int, heads: int, width: int, kind: str, *, residual: bool) -> None:
        """One norm. Without a residual, x is the middle of a wider matrix, as keys are of all projections."""
        dense = KINDS[kind](self.numbers(tokens, heads, width).float()).half()
        x = dense
        if not residual:
            wide = self.numbers(tokens, heads * width + 16)
            x = wide[:, 8 : 8 + heads * width].unflatten(1, (heads, width))
            x.copy_(dense)
        weight = self.numbers(width)
        former = self.numbers(tokens, heads, width) if residual else None
        now = None if former is None else former.clone()
        buffer = torch.full((dense.numel() + 2 * GUARD,), torch.nan, dtype=torch.float16, device="cuda")
        y = buffer[GUARD:-GUARD].view(tokens, heads, width)
        self.native.norm(x, now, weight, EPS, y)
        what = f"tokens={tokens} heads={heads} width={width} {kind} residual={residual}"
        self.judge_norm(what, dense, former, now, weight, y)
        around = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
        self.expect("norm", f"{what}: wrote outside y", bool(around.isnan().all()))

    def judge_norm(
        self,
        what: str,
        x: torch.Tensor,
        former: torch.Tensor | None,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """The residual's bits, and y's error against float64."""
        exact = x
        if former is not None and residual is not None:
            exact = x + former
            self.expect("norm", f"{what}: another residual than PyTorch's", torch.equal(exact, residual))
        wide = exact.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        allowed = expected.abs() * RELATIVE + SMALLEST * (1 + weight.double().abs())
        self.all_within("norm", what, (y.double() - expected).abs() / allowed)

    def table(self, rotated: int) -> torch.Tensor:
        """cos_sin [POSITIONS, rotated] as vLLM makes it."""
        frequencies = 10_000.0 ** -(torch.arange(0, rotated, 2, device="cuda").double() / rotated)
        angles = torch.arange(POSITIONS, device="cuda").double()[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1).half()

    def rotation(self, tokens: int, heads: int, head: int, rotated: int, *, halves: bool) -> None:
        """One rotation of heads inside a wider matrix."""
        cos_sin = self.table(rotated)
        positions = torch.randint(0, POSITIONS, (tokens,), device="cuda", generator=self.random)
        wide = self.numbers(tokens, heads * head + 16)
        expected = wide.clone()
        self.native.rotate(positions, wide[:, 8:-8].unflatten(1, (heads, head)), cos_sin, halves=halves)
        turned = expected[:, 8:-8].unflatten(1, (heads, head))
        turned.copy_(rotated_by_torch(turned, cos_sin[positions], halves=halves))
        what = f"tokens={tokens} heads={heads} head={head} rotated={rotated} halves={halves}"
        self.expect("rotation", f"{what}: other bits than PyTorch's", torch.equal(wide, expected))


def rotated_by_torch(x: torch.Tensor, cos_sin: torch.Tensor, *, halves: bool) -> torch.Tensor:
    """x [T, heads, D] rotated by cos_sin [T, rotated], in x's dtype."""
    cos, sin = (part[:, None] for part in cos_sin.chunk(2, dim=-1))
    size = cos_sin.shape[1]
    rotated, rest = x[..., :size], x[..., size:]
    a, b = rotated.chunk(2, dim=-1) if halves else (rotated[..., ::2], rotated[..., 1::2])
    parts = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat(parts, dim=-1) if halves else torch.stack(parts, dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def check_ops(checker: Checker) -> None:
    """The operators' results, and bad arguments with what their errors must say."""
    ops = torch.ops.voltserve
    for shape in ((1, 5120), (3, 576), (0, 64), (5, 7, 128), (100, 4096)):
        x, weight, y = checker.numbers(*shape), checker.numbers(shape[-1]), checker.numbers(*shape)
        former = checker.numbers(*shape)
        if x.numel():
            ops.rms_norm_to(y, x, weight, EPS)
            checker.judge_norm(f"op {shape}", x, None, None, weight, y)
        normed, residual = x.clone(), former.clone()
        ops.add_rms_norm(normed, residual, weight, EPS)
        if x.numel():
            checker.judge_norm(f"op {shape} residual", x, former, residual, weight, normed)
    for halves, with_key in itertools.product((True, False), (True, False)):
        cos_sin, positions = checker.table(64), torch.arange(9, device="cuda") * 17
        qkv = checker.numbers(9, 6 * 128)
        query, key, value = qkv.clone().split([4 * 128, 128, 128], dim=-1)
        ops.rotary_embedding(positions, query, key if with_key else None, 128, cos_sin, halves)
        for name, part, first, heads in (("query", query, 0, 4), ("key", key, 4, 1), ("value", value, 5, 1)):
            expected = qkv[:, first * 128 : (first + heads) * 128].unflatten(1, (heads, 128))
            if name == "query" or (name == "key" and with_key):
                expected = rotated_by_torch(expected, cos_sin[positions], halves=halves)
            same = torch.equal(part.unflatten(1, (heads, 128)), expected)
            checker.expect("op", f"rotary_embedding {name} halves={halves} key={with_key}: other bits", same)
    x, weight, cos_sin = checker.numbers(8, 512), checker.numbers(512), checker.table(64)
    positions = torch.arange(8, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "x: expected Half": lambda: ops.rms_norm_to(x, x.float(), weight, EPS),
        "y: expected contiguous Half": lambda: ops.rms_norm_to(x[:4], x, weight, EPS),
        "weight: expected contiguous Half [512]": lambda: ops.rms_norm_to(x.clone(), x, weight[:8], EPS),
        "x: expected [T, H] or [T, heads, D]": lambda: ops.rms_norm_to(x[None, None], x[None, None], weight, EPS),
        "residual: expected contiguous Half": lambda: ops.add_rms_norm(x.clone(), x[:4], weight, EPS),
        "cos_sin: expected an even width": lambda: ops.rotary_embedding(positions, x, None, 32, cos_sin, True),
        "positions: expected contiguous Long": lambda: ops.rotary_embedding(
            positions.int(), x, None, 64, cos_sin, True
        ),
    }
    for message, call in calls.items():
        try:
            call()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        checker.expect("refused", f"expected {message}, got {said}", message in said)


def main() -> int:
    """Returns 0 if every case passed."""
    options = parser(__doc__)
    options.add_argument("--library", type=Path, default=LIBRARY)
    options.add_argument("--ops", type=Path)
    options.add_argument("--quick", action="store_true", help="few cases, for compute-sanitizer")
    arguments = options.parse_args()
    checker = Checker(arguments.library)
    rows = (1, 7) if arguments.quick else ROWS
    for tokens, width in itertools.product(rows, (72, 5120) if arguments.quick else WIDTHS):
        for kind in ("usual",) if arguments.quick else KINDS:
            checker.norm(tokens, 1, width, kind, residual=True)
            checker.norm(tokens, 1, width, kind, residual=False)
            if width <= 256:  # heads
                checker.norm(tokens, 5, width, kind, residual=False)
    for tokens, heads, (head, rotated) in itertools.product(rows, (1, 8, 40), ROTATED):
        for halves in (True, False):
            checker.rotation(tokens, heads, head, rotated, halves=halves)
    if arguments.ops:
        torch.ops.load_library(str(arguments.ops))
        check_ops(checker)
    return checker.finish("the plain norm and rotation, against float64 and PyTorch's bits", arguments.output)


if __name__ == "__main__":
    sys.exit(main())
