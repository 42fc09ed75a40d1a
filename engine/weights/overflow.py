"""Finds NaN and infinity in weights, and weights that float16 cannot hold: bfloat16 reaches 3.4e38, float16 65,504.

NaN or infinity in one tensor makes every output NaN. The engine would start, and fail at its first request. Volta
computes in float16, so bfloat16 and float32 tensors of a checkpoint are cast at load. Rounding and numbers below the
normal range are accepted. A number that becomes infinite is as bad as NaN.
"""

import torch
from torch import nn

from quant import e4m3
from quant.errors import QuantError
from quant.formats import registry
from quant.verify.layers import KV_SCALES

_WIDER = (torch.bfloat16, torch.float32, torch.float64)
_E4M3 = (torch.float8_e4m3fn,)
_DAMAGED = (
    "`voltserve verify DIR` names every such tensor. Download its file again; if its source holds the same, take "
    "another export of the model"
)
_REMEDY = (
    "Serve another export of the model, or one whose tensor was scaled to fit. On a CPU --dtype float32 holds it, and "
    "GPUs from compute capability 8.0 compute in bfloat16"
)


class OverflowCheck:
    """Examines each tensor of a checkpoint as it is loaded, and then the model's parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: the engine's. Only float16 can overflow."""
        self._dtype = dtype
        layouts = registry.layouts()
        # Scales of what stays in 16 bits here: activations and the cache.
        self._unused = tuple(f".{suffix}" for suffix in (*(layout.input_scale for layout in layouts), *KV_SCALES))
        # Kept in float32, whatever the engine's dtype is.
        self._scalars = tuple(f".{layout.global_scale}" for layout in layouts) + self._unused
        self._not_finite: list[str] = []
        self._too_large: list[str] = []

    def look_at(self, name: str, tensor: torch.Tensor, file: str) -> None:
        """Records tensor `name` of `file` if a value is NaN or infinite, or would be in float16."""
        if not tensor.numel() or name.endswith(self._unused):
            return
        stored = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype in _E4M3:
            if not _finite(tensor):
                self._not_finite.append(f"{name} ({file}): expected finite values, got nan in {stored}")
            return
        if tensor.dtype not in (torch.float16, *_WIDER):
            return
        ends = torch.stack(tensor.aminmax())  # NaN if any value is NaN
        if not ends.isfinite().all():
            value = float(ends[~ends.isfinite()][0])
            self._not_finite.append(f"{name} ({file}): expected finite values, got {value:g} in {stored}")
        elif self._dtype == torch.float16 and tensor.dtype in _WIDER and not name.endswith(self._scalars):
            if not ends.to(torch.float16).isfinite().all():
                largest = float(ends[ends.abs().argmax()])
                self._too_large.append(f"{name} ({file}): expected values within ±65,504, got {largest:g} in {stored}")

    def judge(self, model: nn.Module) -> None:
        """Checks the model's parameters: it does not load all tensors, and keeps some in float32.

        Raises:
            QuantError: names the tensors at fault.
        """
        if self._not_finite and any(not _finite(parameter) for parameter in model.parameters()):
            raise QuantError(_some(self._not_finite), _DAMAGED)
        if self._too_large and any(
            parameter.dtype == torch.float16 and parameter.isinf().any() for parameter in model.parameters()
        ):
            raise QuantError(f"float16 cannot hold {_some(self._too_large)}", _REMEDY)


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return True
    if tensor.dtype not in _E4M3:
        return not tensor.is_floating_point() or bool(torch.stack(tensor.aminmax()).isfinite().all())
    # It has no infinity. NaN is the largest byte of either sign. Torch compares no fp8, and masks bytes slowly.
    signed, unsigned = tensor.view(torch.int8), tensor.view(torch.uint8)
    return bool(signed.max() < e4m3.NAN and unsigned.max() < (0x80 | e4m3.NAN))


def _some(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more
