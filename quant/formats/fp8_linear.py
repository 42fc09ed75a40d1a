"""Reads an FP8 linear's tensors, of any format, into the internal tensor."""

from collections.abc import Mapping

import torch

from quant import e4m3
from quant.errors import QuantError
from quant.formats.fp8 import SCALES, WEIGHT
from quant.formats.weights import FP8_BLOCK, fp8_kind
from quant.tensor import FP8Tensor

_REMEDY = "Check the model with `voltserve verify` and download what is damaged again"


def read_linear(tensors: Mapping[str, torch.Tensor], name: str) -> FP8Tensor:
    """The linear `name` from its tensors, keyed by suffix. Raises QuantError naming the tensor, expected and got."""
    found = [suffix for suffix in SCALES if suffix in tensors]
    if WEIGHT not in tensors or len(found) != 1:
        got = ", ".join(sorted(tensors)) or "nothing"
        raise QuantError(f"{name}: expected {WEIGHT} and one of {', '.join(SCALES)}, got {got}", _REMEDY)
    codes, stored = tensors[WEIGHT], tensors[found[0]]
    where = f"{name}.{found[0]}"
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        got = f"{codes.dtype} {list(codes.shape)}"
        raise QuantError(f"{name}.{WEIGHT}: expected float8_e4m3fn [N, K], got {got}", _REMEDY)
    rows, columns = codes.shape
    kind = fp8_kind(rows, columns, tuple(stored.shape))
    if kind is None:
        expected = f"one scale, one per row or one per {FP8_BLOCK}x{FP8_BLOCK} block of {[rows, columns]}"
        raise QuantError(f"{where}: expected {expected}, got {list(stored.shape)}", _REMEDY)
    group_size = kind.columns_per_scale(columns)
    scales = spread(stored, rows, -(-columns // group_size))
    check(codes, scales, name, found[0])
    return FP8Tensor(codes, scales, group_size)


def spread(stored: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """A scale tensor as stored, as float32 [rows, groups]: a scale per tensor or per block is repeated for its rows."""
    scales = stored.float()
    if stored.numel() == 1:
        return scales.reshape(1, 1).expand(rows, groups).clone()
    if groups == 1 and stored.numel() == rows:
        return scales.reshape(rows, 1)
    blocks = scales.reshape(-1, groups)
    return blocks.repeat_interleave(FP8_BLOCK, dim=0)[:rows].contiguous()


def check(codes: torch.Tensor, scales: torch.Tensor, name: str, suffix: str) -> None:
    """Raises QuantError for a NaN among the codes, and for scales that are not finite or are negative."""
    nan = codes.view(torch.uint8) & e4m3.NAN == e4m3.NAN
    if nan.any():
        raise QuantError(f"{name}.{WEIGHT}{nan.nonzero()[0].tolist()}: expected a number, got NaN", _REMEDY)
    wrong = ~(torch.isfinite(scales) & (scales >= 0))
    if wrong.any():
        row, group = wrong.nonzero()[0].tolist()
        got = float(scales[row, group])
        raise QuantError(f"{name}.{suffix}: expected positive scales, got {got} for row {row}", _REMEDY)
