"""What a quantized linear's weights are: elements, and the scales that they share. Torch-free.

A weight is w[n, k] = element(code[n, k]) * scale(n, k) * row_factor[n]. Formats differ in names and directions only.
Verify, plan and the engine's methods follow from the kind, which a linear's own tensors tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

# E2M1: 4 bits. E4M3: 8 bits.
Element = Literal["E2M1", "E4M3"]
BITS = {"E2M1": 4, "E4M3": 8}
# Columns of activations that our kernels read at a time.
KERNEL_COLUMNS = 16
# The one size of blocks with a scale of their own that FP8 checkpoints are served with.
FP8_BLOCK = 128


@dataclass(frozen=True)
class WeightKind:
    """Elements, and the rows and columns that share a scale. 0 means all of them.

    (1, 16): NVFP4's groups, beside a factor per row. (0, 0): one scale per tensor. (1, 0): one per row.
    (128, 128): one per block.
    """

    element: Element
    rows: int
    columns: int

    def __str__(self) -> str:
        if self.element == "E2M1":
            return "NVFP4"
        what = "tensor" if not self.rows else "channel" if not self.columns else f"{self.rows}x{self.columns} block"
        return f"FP8 per {what}"

    def columns_per_scale(self, columns: int) -> int:
        """How many of K = `columns` columns of a row share a scale."""
        return self.columns or columns

    @property
    def column_multiple(self) -> int:
        """What K has to be a multiple of on each rank."""
        return max(self.columns, KERNEL_COLUMNS)

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix as the engine keeps it: codes, scales, and a float32 factor per row of E2M1."""
        codes = rows * columns * BITS[self.element] // 8
        if self.element == "E2M1":
            return codes + rows * columns // self.columns + 4 * rows
        return codes + 4 * rows * ceil(columns / self.columns_per_scale(columns))


def nvfp4(group_size: int) -> WeightKind:
    """NVFP4 with `group_size` weights per block scale."""
    return WeightKind("E2M1", 1, group_size)


PER_TENSOR, PER_ROW = WeightKind("E4M3", 0, 0), WeightKind("E4M3", 1, 0)
PER_BLOCK = WeightKind("E4M3", FP8_BLOCK, FP8_BLOCK)


def fp8_kind(rows: int, columns: int, scale_shape: tuple[int, ...]) -> WeightKind | None:
    """The kind of an FP8 linear [rows, columns] by its scale's shape. None for a shape that no kind here has."""
    shape = tuple(size for size in scale_shape if size != 1)
    blocks = (ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK))
    if not shape:
        return PER_TENSOR
    if len(scale_shape) <= 2 and scale_shape[0] == rows and shape == (rows,):
        return PER_ROW
    # ModelOpt writes [N / 128, 1, K / 128, 1].
    return PER_BLOCK if shape == tuple(size for size in blocks if size != 1) else None
