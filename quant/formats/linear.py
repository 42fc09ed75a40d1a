"""Reads a linear's tensors, in any layout, into the one internal tensor, and writes them from it."""

from collections.abc import Mapping

import torch

from quant import e4m3
from quant.errors import QuantError
from quant.formats.scheme import LinearLayout
from quant.tensor import NVFP4Tensor

_REMEDY = "Check the model with `voltserve verify` and download what is damaged again"


def read_linear(layout: LinearLayout, tensors: Mapping[str, torch.Tensor], name: str, group_size: int) -> NVFP4Tensor:
    """The linear `name` from its tensors, keyed by suffix. Tensors outside the layout are ignored.

    An all-zero weight may have any global scale, even NaN. Raises QuantError naming the tensor, expected and got.
    """
    for suffix in (layout.codes, layout.scales, layout.global_scale):
        if suffix not in tensors:
            raise QuantError(f"{name}.{suffix} is missing", _REMEDY)
    codes, scales, stored = (tensors[suffix] for suffix in (layout.codes, layout.scales, layout.global_scale))
    if stored.dtype != torch.float32 or stored.numel() != 1:
        got = f"{stored.dtype} {list(stored.shape)}"
        raise QuantError(f"{name}.{layout.global_scale}: expected torch.float32 [1], got {got}", _REMEDY)
    factor = 1 / stored.reshape(1) if layout.divides else stored.reshape(1)
    if not (torch.isfinite(factor) & (factor > 0)):
        if not is_all_zero(codes, scales):
            what = "divisor" if layout.divides else "multiplier"
            raise QuantError(f"{name}.{layout.global_scale}: expected a positive {what}, got {float(stored)}", _REMEDY)
        factor = torch.ones_like(factor)
    try:
        tensor = NVFP4Tensor(codes, scales, factor.expand(codes.shape[0]).clone(), group_size)
    except ValueError as error:
        where = f"codes are {layout.codes}, block_scales are {layout.scales}"
        raise QuantError(f"{name}: {error} ({where})", _REMEDY) from None
    nan = scales.view(torch.uint8) & e4m3.NAN == e4m3.NAN
    if nan.any():
        raise QuantError(f"{name}.{layout.scales}{nan.nonzero()[0].tolist()}: expected a number, got NaN", _REMEDY)
    return tensor


def write_linear(layout: LinearLayout, tensor: NVFP4Tensor, name: str) -> dict[str, torch.Tensor]:
    """The tensors of the linear `name`, keyed by suffix. `read_linear` reads the same values from them.

    Raises ValueError if the rows have different factors, or a factor that the layout cannot hold without rounding.
    """
    factor = tensor.row_factor[:1]
    if not torch.equal(tensor.row_factor, factor.expand_as(tensor.row_factor)):
        raise ValueError(f"{name}: expected one factor for all rows, got several; write the fused layer's parts apart")
    stored = exact_reciprocal(factor) if layout.divides else factor.clone()
    if stored is None:
        raise ValueError(f"{name}: factor {float(factor)} is not the reciprocal of any float32")
    return {layout.codes: tensor.codes, layout.scales: tensor.block_scales, layout.global_scale: stored}


def exact_reciprocal(number: torch.Tensor) -> torch.Tensor | None:
    """The float32 whose float32 reciprocal is `number` (float32 [1], positive). None if there is none.

    Division rounds, so it may be a neighbour of 1 / number. Just below a power of two, reciprocals are twice as far
    apart as numbers. Half of the numbers there have none.
    """
    nearest = 1 / number
    for candidate in (nearest, nearest.nextafter(torch.zeros_like(nearest)), nearest.nextafter(2 * nearest)):
        if torch.equal(1 / candidate, number):
            return candidate
    return None


def is_all_zero(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether every element is 0 or -0, whatever the global scale."""
    return not ((codes & 0x77).any() and (scales.view(torch.uint8) & 0x7F).any())
