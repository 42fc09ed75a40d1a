"""Checks the norm between GEMMs (kernels/cuda/norm/norm.cuh) on the GPU at hand, and writes the result as JSON.

    python -m kernels.tools.gpu_check_norm [--library FILE.so] [--ops FILE.so] [--quick] --output docs/results/NAME.json

The residual must have the bits of PyTorch's additions, one after another. y is compared with float64, from that
residual. Ranks are streams of one GPU here. scripts/gpu_tp2/reduce.py has a GPU per rank. y is filled with NaN before
each launch, and the memory around it must not change. --ops also checks the op's arguments and results. `--quick`: few
cases and no ranks, for compute-sanitizer, under which two kernels may not run at the same time.
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
from kernels.tools.native_all_reduce import EPOCHS, SLOT_BYTES
from kernels.tools.native_norm import NormLibrary

HIDDEN = (8, 64, 72, 576, 2048, 2560, 3584, 3592, 4096, 5120, 7168, 8192, 12_288, 16_384)
ROWS = (1, 2, 7, 16, 33, 64)
EPS = 1e-6
GUARD = 64  # elements of poison before and after y
# y is rounded twice, relative to itself or, where it is small, by half of float16's smallest step.
RELATIVE, SMALLEST = 2.0**-10 * 1.01, 2.0**-24
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "usual": lambda x: x,
    "large": lambda x: x * 1000,
    "tiny": lambda x: x * 2.0**-16,
    "one outlier": lambda x: torch.where(torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1, 30_000.0, x),
    "zeros": torch.zeros_like,
}
Places = tuple[list[int], list[int], torch.Tensor, int]


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self, library: Path) -> None:
        super().__init__()
        self.native = NormLibrary(library)
        self.random = torch.Generator("cuda").manual_seed(11)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Normally distributed float16."""
        return torch.randn(*shape, device="cuda", generator=self.random).half()

    def alone(self, rows: int, hidden: int, kind: str, *, residual: bool) -> None:
        """No ranks."""
        x, weight = KINDS[kind](self.numbers(rows, hidden).float()).half(), self.numbers(hidden)
        former = self.numbers(rows, hidden) if residual else None
        now = None if former is None else former.clone()
        buffer, y = self.guarded(rows, hidden)
        self.native.norm(x, now, weight, EPS, y)()
        what = f"rows={rows} hidden={hidden} {kind} residual={residual}"
        self.judge("alone", what, x, former, now, weight, y)
        self.intact("alone", what, buffer)

    def ranks(self, rows: int, hidden: int, ranks: int, kind: str) -> None:
        """The sum of all ranks' x over several calls, with one stream per rank."""
        slots = torch.zeros(ranks, SLOT_BYTES, dtype=torch.uint8, device="cuda")
        addresses = [slots[rank].data_ptr() for rank in range(ranks)]
        epochs = [torch.ones(EPOCHS, dtype=torch.int32, device="cuda") for _ in range(ranks)]
        streams = [torch.cuda.Stream() for _ in range(ranks)]
        weight = self.numbers(hidden)
        for call in range(3):
            shares = [KINDS[kind](self.numbers(rows, hidden).float()).half() for _ in range(ranks)]
            former = self.numbers(rows, hidden) if call else None
            now = [None if former is None else former.clone() for _ in range(ranks)]
            ys = [self.guarded(rows, hidden) for _ in range(ranks)]
            late = torch.zeros(1, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            for rank, stream in enumerate(streams):
                places: Places = ([addresses[rank]], addresses, epochs[rank], rank)
                launch = self.native.norm(shares[rank], now[rank], weight, EPS, ys[rank][1], places, 5.0, late)
                with torch.cuda.stream(stream):
                    launch()
            torch.cuda.synchronize()
            what = f"rows={rows} hidden={hidden} ranks={ranks} {kind} call={call}"
            self.expect("ranks", f"{what}: a rank did not answer", int(late) == 0)
            total = shares[0].float()
            for share in shares[1:]:
                total = total + share.float()
            for rank in range(ranks):
                self.judge("ranks", f"{what} rank={rank}", total.half(), former, now[rank], weight, ys[rank][1])
                self.intact("ranks", what, ys[rank][0])
                self.expect("ranks", f"{what}: other bits on rank {rank}", torch.equal(ys[rank][1], ys[0][1]))

    def judge(
        self,
        kind: str,
        what: str,
        x: torch.Tensor,
        former: torch.Tensor | None,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """One launch's results: residual's bits, and y's error."""
        torch.cuda.synchronize()
        exact = x
        if former is not None and residual is not None:
            exact = x + former
            self.expect(kind, f"{what}: another residual than PyTorch's", torch.equal(exact, residual))
        wide = exact.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
        expected = normed * weight.double()
        allowed = expected.abs() * RELATIVE + SMALLEST * (1 + weight.double().abs())
        self.all_within(kind, what, (y.double() - expected).abs() / allowed)

    def guarded(self, rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer, view [rows, hidden] inside it), all NaN."""
        buffer = torch.full((rows * hidden + 2 * GUARD,), torch.nan, dtype=torch.float16, device="cuda")
        return buffer, buffer[GUARD:-GUARD].view(rows, hidden)

    def intact(self, kind: str, what: str, buffer: torch.Tensor) -> None:
        """Fails the case if the guards were written."""
        around = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
        self.expect(kind, f"{what}: wrote outside y", bool(around.isnan().all()))


def check_op(checker: Checker) -> None:
    """The op's results without ranks, and bad arguments with what their errors must say."""
    op = torch.ops.voltserve.all_reduce_rms_norm
    rest: tuple[Any, ...] = ([], [], None, 0, 0.0)
    for shape in ((1, 5120), (3, 576), (0, 64), (2, 3, 128), (100, 4096)):
        x, weight, former = checker.numbers(*shape), checker.numbers(shape[-1]), checker.numbers(*shape)
        for residual in (None, former.clone()):
            y = op(x, residual, weight, EPS, *rest)
            if x.numel():
                checker.judge("op", f"{shape}", x, None if residual is None else former, residual, weight, y)
            else:
                checker.expect("op", f"{shape}: expected its shape", y.shape == x.shape)
    x, weight = checker.numbers(8, 5120), checker.numbers(5120)
    epochs = torch.ones(EPOCHS, dtype=torch.int32, device="cuda")
    many = checker.numbers(65, 5120)
    calls: dict[str, Callable[[], Any]] = {
        "x: expected contiguous Half": lambda: op(x.float(), None, weight, EPS, *rest),
        "x: expected [..., 5120]": lambda: op(x[:, :64], None, weight, EPS, *rest),
        "x: expected a 16-byte boundary": lambda: op(x.flatten()[1:5121], None, weight, EPS, *rest),
        "weight: expected contiguous Half [any]": lambda: op(x, None, weight.float(), EPS, *rest),
        "residual: expected contiguous Half": lambda: op(x, x[:4], weight, EPS, *rest),
        "hidden: expected a multiple of 8": lambda: op(x[:, :12].contiguous(), None, weight[:12], EPS, *rest),
        "from_: expected 2 to 8 addresses": lambda: op(x, None, weight, EPS, [16], [16], epochs, 0, 1.0),
        "x: rows: expected at most 64": lambda: op(many, None, weight, EPS, [16], [16, 32], epochs, 0, 1.0),
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
    options.add_argument("--quick", action="store_true")
    arguments = options.parse_args()
    checker = Checker(arguments.library)
    hidden_sizes = (72, 5120, 16_384) if arguments.quick else HIDDEN
    for rows, hidden in itertools.product((1, 7) if arguments.quick else ROWS, hidden_sizes):
        for number, kind in enumerate(KINDS):
            if number == 0 or not arguments.quick:
                checker.alone(rows, hidden, kind, residual=True)
                checker.alone(rows, hidden, kind, residual=False)
    if not arguments.quick:
        for rows, hidden in ((1000, 5120), (3, 16_384)):
            checker.alone(rows, hidden, "usual", residual=True)
        places = torch.cuda.get_device_properties(0).multi_processor_count  # for all ranks' blocks at once
        for ranks, rows, hidden in itertools.product((2, 3, 8), ROWS, HIDDEN):
            if rows <= (1 << 20) // 2 // hidden and ranks * rows <= places:
                for kind in ("usual", "large"):
                    checker.ranks(rows, hidden, ranks, kind)
    if arguments.ops:
        torch.ops.load_library(str(arguments.ops))
        check_op(checker)
    return checker.finish("residual addition and RMS norm, with and without ranks, against float64", arguments.output)


if __name__ == "__main__":
    sys.exit(main())
