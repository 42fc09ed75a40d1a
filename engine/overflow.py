"""16-bit weights that do not fit into float16: bfloat16 reaches 3.4e38, float16 65,504.

Volta computes in float16, so bfloat16 and float32 tensors of a checkpoint are cast at load. What rounds, or is too
small for a normal number, is as near as float16 comes; what becomes infinite makes every output NaN.
"""

import torch
from torch import nn

from quant.errors import QuantError
from quant.formats import compressed_tensors, modelopt
from quant.verify.layers import KV_SCALES

# Kept in float32 whatever the engine's dtype is.
_SCALARS = tuple(
    f".{suffix}"
    for layout in (compressed_tensors.LAYOUT, modelopt.LAYOUT)
    for suffix in (layout.global_scale, layout.input_scale, *KV_SCALES)
)
_WIDER = (torch.bfloat16, torch.float32, torch.float64)
_REMEDY = (
    "Serve another export of the model, or one whose tensor was scaled to fit. On a CPU --dtype float32 holds it, and "
    "GPUs from compute capability 8.0 compute in bfloat16"
)


class OverflowCheck:
    """Looks at each tensor of a checkpoint as it is loaded, and then at what the model holds."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: what the engine computes in; only float16 is checked."""
        self._dtype = dtype
        self._too_large: list[str] = []

    def look_at(self, name: str, tensor: torch.Tensor, file: str) -> None:
        """Remembers tensor `name` of `file` if a value of it is infinite in float16."""
        if self._dtype != torch.float16 or tensor.dtype not in _WIDER or not tensor.numel() or name.endswith(_SCALARS):
            return
        ends = torch.stack(tensor.aminmax())
        if not ends.to(torch.float16).isfinite().all():
            largest = float(ends[ends.abs().argmax()])
            stored = str(tensor.dtype).removeprefix("torch.")
            self._too_large.append(f"{name} ({file}): expected values within ±65,504, got {largest:g} in {stored}")

    def judge(self, model: nn.Module) -> None:
        """Raises QuantError naming the tensors that overflowed, if any did: some models keep some in float32."""
        if self._too_large and any(
            parameter.dtype == torch.float16 and parameter.isinf().any() for parameter in model.parameters()
        ):
            more = f" and {len(self._too_large) - 3} more" if len(self._too_large) > 3 else ""
            raise QuantError(f"float16 cannot hold {'; '.join(self._too_large[:3])}{more}", _REMEDY)
