"""The in-memory forms of quantized matrices, E2M1 and E4M3. Every on-disk format is read into one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant import e2m1, e4m3
from quant.constants import GROUP_SIZES
from quant.parallel import row_chunks


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A matrix [N, K] with w[n, k] = e2m1(code[n, k]) * block_scales[n, k // group_size] * row_factor[n].

    codes: uint8 [N, K/2], two E2M1 codes per byte, the even column in the low nibble.
    block_scales: float8_e4m3fn [N, K/group_size].
    row_factor: float32 [N], always a multiplier. One per row, not one per tensor: the members of a fused layer (q/k/v,
    gate/up) may carry different globals, and stay exact.
    group_size: columns that share a block scale, 16 or 32.

    Raises ValueError for a wrong dtype, shape or device. It names the argument, expected and got.
    """

    codes: torch.Tensor
    block_scales: torch.Tensor
    row_factor: torch.Tensor
    group_size: int

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size: expected 16 or 32, got {self.group_size}")
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"codes: expected uint8 [N, K/2], got {_describe(self.codes)}")
        rows, columns = self.shape
        if columns % self.group_size:
            raise ValueError(f"codes: expected K a multiple of {self.group_size}, got K={columns}")
        self._expect("block_scales", torch.float8_e4m3fn, (rows, columns // self.group_size))
        self._expect("row_factor", torch.float32, (rows,))

    def _expect(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor: torch.Tensor = getattr(self, name)
        if (tensor.dtype, tuple(tensor.shape), tensor.device) != (dtype, shape, self.codes.device):
            expected = f"{_short(dtype)} {list(shape)} on {self.codes.device}"
            raise ValueError(f"{name}: expected {expected}, got {_describe(tensor)}")

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (N, K)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix [N, K] in `dtype`. Code * block scale is exact in float16. The factor is applied in float32."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        # On this thread, not by for_row_chunks. In an engine, libiomp with vLLM's barriers crashes when a thread of
        # for_row_chunks ends (docs/log.md).
        for chunk in row_chunks(rows, columns):
            values = e2m1.decode(e2m1.unpack(self.codes[chunk]), torch.float16)
            scales = e4m3.decode(self.block_scales[chunk], torch.float16)
            exact = values.view(*scales.shape, self.group_size) * scales.unsqueeze(-1)
            out[chunk] = exact.view(values.shape).float() * self.row_factor[chunk, None]
        return out


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: torch.Tensor) -> str:
    return f"{_short(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"


@dataclass(frozen=True, eq=False)
class FP8Tensor:
    """A matrix [N, K] with w[n, k] = codes[n, k] * scales[n, k // group_size].

    codes: float8_e4m3fn [N, K].
    scales: float32 [N, ceil(K / group_size)], multipliers. Every format's scale, per tensor, per row or per block, is
    spread over the rows: the members of a fused layer then stay exact.
    group_size: columns that share a scale.

    Raises ValueError for a wrong dtype or shape. It names the argument, expected and got.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.float8_e4m3fn or self.codes.dim() != 2:
            raise ValueError(f"codes: expected float8_e4m3fn [N, K], got {_describe(self.codes)}")
        if self.group_size <= 0:
            raise ValueError(f"group_size: expected at least 1, got {self.group_size}")
        rows, columns = self.shape
        shape = (rows, -(-columns // self.group_size))
        if (self.scales.dtype, tuple(self.scales.shape)) != (torch.float32, shape):
            raise ValueError(f"scales: expected float32 {list(shape)}, got {_describe(self.scales)}")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix [N, K] in `dtype`. The product is rounded once, from float32."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        for chunk in row_chunks(rows, columns):  # on this thread, as NVFP4Tensor.dequantize says
            scales = self.scales[chunk].repeat_interleave(self.group_size, dim=1)[:, :columns]
            out[chunk] = e4m3.decode(self.codes[chunk]) * scales
        return out
