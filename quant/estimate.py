"""Estimates memory, disk and time of quantizing a model, from the sizes of its tensors, before any weight is read.

Passes do not overlap, so memory is that of the largest one. Time is arithmetic divided by this machine's rate, which a
small GEMM measures. The scale search counts as much arithmetic per weight as the rate times its measured duration.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quant.calibrate import LANES, sums_bytes
from quant.errors import QuantError
from quant.formats import compressed_tensors
from quant.methods import Method
from quant.transformers_model import available_memory

if TYPE_CHECKING:
    from quant.safetensors_file import Checkpoint
    from quant.selection import Selection

# Python with torch and transformers loaded, seen on this project's machines.
_PROCESS_BYTES = 700_000_000
# Floating-point operations per weight, as measured on SmolLM2-135M (README, "Figures").
_SEARCH = {"maxabs": 1000, "fourosix": 2000, "mse": 4000, "quasar": 6000}
# Compensation passes each column's errors on to later columns. Memory bounds that: it takes this many times as long as
# its arithmetic. In small matrices the calls per column dominate: each column takes as long as _COLUMN operations.
_COLUMN_BY_COLUMN = 4
_COLUMN = 10_000_000
# The range of a time, as multiples of the computed one. Few operations reach the rate of a GEMM.
_TIME_RANGE = (1.0, 3.0)


@dataclass(frozen=True)
class Estimate:
    """Bytes, and seconds (fewest, most). `smaller`: methods that take less memory, best first, each with its bytes."""

    method: Method
    memory: int
    disk: int
    seconds: tuple[float, float]
    output_bytes: int
    smaller: tuple[tuple[Method, int], ...]

    def refuse_what_does_not_fit(self, src: Path, dst: Path) -> None:
        """Raises QuantError where memory or disk do not suffice; for memory it names the methods that fit."""
        free = available_memory()
        if self.memory > free:
            fitting = [f"{method.flags} ({gigabytes(size)})" for method, size in self.smaller if size <= free]
            remedy = (
                f"Without a larger machine, this fits: {' or '.join(fitting)}" if fitting else "Use a machine with more"
            )
            expected = f"{gigabytes(self.memory)} of free memory for {self.method.flags}"
            raise QuantError(f"{src}: expected {expected}, got {gigabytes(free)}", remedy)
        there = free_disk(dst)
        if self.disk > there:
            raise QuantError(
                f"{dst}: expected {gigabytes(self.disk)} of free disk with unfinished results, got {gigabytes(there)}",
                "Free some, or name a destination on another disk",
            )

    def as_text(self, dst: Path) -> str:
        """For people: one line each for memory, disk and time."""
        fewest, most = self.seconds
        there = gigabytes(free_disk(dst))
        return (
            f"memory  {gigabytes(self.memory)} of {gigabytes(available_memory())} free\n"
            f"disk    {gigabytes(self.disk)} of {there} free; {gigabytes(self.output_bytes)} of it stay\n"
            f"time    {_duration(fewest)} to {_duration(most)} at the rate this machine has now"
        )


def estimate(
    checkpoint: Checkpoint, selection: Selection, method: Method, group_size: int, windows: int, window_tokens: int
) -> Estimate:
    """What `method` takes on this machine. It calibrates on `windows` of `window_tokens`; both are 0 if it does not."""
    shapes = [checkpoint.tensors[f"{module}.weight"].shape for module in selection.linears]
    packed = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for rows, columns in shapes
        for _, dtype, shape in compressed_tensors.layout(rows, columns, group_size)
    )
    kept = sum(checkpoint.tensors[name].nbytes for name in selection.kept)
    others = [Method("quasar"), Method("mse")] if method.compensate else [Method("mse")] if method.calibrates else []
    sums = sums_bytes([columns for _, columns in shapes], diagonal=not method.compensate) if method.calibrates else 0
    # While shards are written, every linear is on disk twice. While lanes save sums, the old ones are still there.
    disk = 2 * packed + kept + 3 * sums // 2
    parameters = sum(torch.Size(info.shape).numel() for info in checkpoint.tensors.values())
    seconds = _operations(shapes, parameters, method, windows * window_tokens) / _rate() / torch.get_num_threads()
    return Estimate(
        method,
        _memory(checkpoint, shapes, method, window_tokens),
        disk,
        (_TIME_RANGE[0] * seconds, _TIME_RANGE[1] * seconds),
        packed + kept,
        tuple((other, _memory(checkpoint, shapes, other, window_tokens)) for other in others),
    )


def _memory(checkpoint: Checkpoint, shapes: list[tuple[int, ...]], method: Method, window_tokens: int) -> int:
    threads = torch.get_num_threads()
    # A matrix in 16 bits and its codes. Compensation holds it in float32 three times, and H in float64 four times.
    sizes = sorted(
        (
            rows * columns * 3 + (12 * rows * columns + 44 * columns**2 if method.compensate else 0)
            for rows, columns in shapes
        ),
        reverse=True,
    )
    quantizing = sum(sizes[:threads])
    if not method.calibrates:
        return _PROCESS_BYTES + quantizing
    elements = sum(torch.Size(info.shape).numel() for info in checkpoint.tensors.values())
    vocabulary = max(info.shape[0] for info in checkpoint.tensors.values() if len(info.shape) == 2)
    # Logits, their softmax and the gradients of both. Inputs of linears stay in memory for the gradients too.
    activations = LANES * window_tokens * 4 * (4 * vocabulary + sum(rows + columns for rows, columns in shapes))
    sums = sums_bytes([columns for _, columns in shapes], diagonal=not method.compensate)
    return _PROCESS_BYTES + max(4 * elements + sums + activations, quantizing)


def _operations(shapes: list[tuple[int, ...]], parameters: int, method: Method, tokens: int) -> float:
    operations = float(sum(rows * columns for rows, columns in shapes) * _SEARCH[method.policy])
    if method.calibrates:
        # Forward, and backward with respect to inputs only.
        operations += tokens * parameters * (4 if method.policy == "quasar" else 2)
    if method.compensate:
        # The sum of H; its factor in float64, counted twice; each column's errors passed on to later columns.
        operations += sum(
            columns**2 * (2 * tokens + 3 * columns + _COLUMN_BY_COLUMN * rows) + _COLUMN * columns
            for rows, columns in shapes
        )
    return operations


def _rate() -> float:
    """Floating-point operations per second of one core of this machine: the best of a few GEMMs."""
    size, threads = 512, torch.get_num_threads()
    left, right = torch.ones(size, size), torch.ones(size, size)
    torch.set_num_threads(1)
    try:
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            torch.mm(left, right)
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best


def free_disk(path: Path) -> int:
    """Bytes free where `path` is or will be."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def gigabytes(size: int) -> str:
    """With a digit after the point below 10 GB."""
    return f"{size / 1e9:.1f} GB" if size < 10e9 else f"{size / 1e9:.0f} GB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
