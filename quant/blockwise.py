"""Quantizing a matrix to NVFP4: a global factor, E4M3 block scales by a policy, E2M1 codes.

The policies are those of quant/methods/scales.py. With a Hessian, quant/methods/compensate.py rounds column by column
instead of all at once.
"""

import math

import torch

from quant import e2m1, e4m3
from quant.constants import DEFAULT_GROUP_SIZE, GROUP_SIZES
from quant.errors import QuantError
from quant.formats.quantize_config import ScalePolicy
from quant.methods.compensate import quantize_compensated
from quant.methods.scales import LARGEST_SCALE, POLICIES, divide
from quant.parallel import for_row_chunks
from quant.tensor import NVFP4Tensor

# Keeps 1 / divisor a normal float32 in tensors of tiny numbers. Numbers below about 1e-33 are lost there.
LARGEST_DIVISOR = 2.0**100


def largest_magnitude(weight: torch.Tensor, name: str) -> float:
    """max|w|. Raises QuantError naming the tensor and the first index when an element is NaN or Inf."""
    if weight.numel() == 0:
        return 0.0
    low, high = (float(bound) for bound in torch.aminmax(weight))
    if not (math.isfinite(low) and math.isfinite(high)):
        index = torch.nonzero(~torch.isfinite(weight))[0].tolist()
        raise QuantError(
            f"{name}{index}: expected a finite weight, got {float(weight[tuple(index)])}",
            "Download the model again; if its source holds the same value, the model is damaged",
        )
    return max(-low, high)


def global_divisor(amax: float, largest_scale: float = e4m3.MAX) -> torch.Tensor:
    """The float32 factor on weights with which the largest block scale becomes `largest_scale`.

    It is 6 * largest_scale / amax; with 448, the well-known 2688 / amax. 1 for an all-zero tensor. compressed-tensors
    stores it as it is. Its float32 reciprocal is `row_factor`.
    """
    largest_scaled = e2m1.MAX * largest_scale
    return torch.tensor(min(largest_scaled / amax, LARGEST_DIVISOR) if amax else 1.0, dtype=torch.float32)


def quantize_matrix(
    weight: torch.Tensor,
    *,
    policy: ScalePolicy = "mse",
    group_size: int = DEFAULT_GROUP_SIZE,
    amax: float | None = None,
    saliency: torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
    name: str = "weight",
) -> NVFP4Tensor:
    """Quantizes `weight` (float [N, K], K a multiple of group_size) to the nearest codes under the policy's scales.

    `amax` sets the global scale, and must not be below max|w|. Layers that an engine fuses share their largest.
    `saliency`, float32 [K], weighs the columns. The `quasar` policy needs it, or a Hessian.
    `hessian`, float32 [K, K], requests error compensation. Codes are then no longer the nearest.
    `name` is used in errors. Raises QuantError on NaN or Inf, ValueError on a wrong argument.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: expected 16 or 32, got {group_size}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] % group_size:
        raise ValueError(
            f"weight: expected float [N, multiple of {group_size}], got {weight.dtype} {list(weight.shape)}"
        )
    rows, columns = weight.shape
    _expect_columns("saliency", saliency, (columns,))
    _expect_columns("hessian", hessian, (columns, columns))
    own = largest_magnitude(weight, name)
    if amax is None:
        amax = own
    if amax < own:
        raise ValueError(f"amax: expected at least max|{name}| = {own}, got {amax}")
    divisor = global_divisor(amax, LARGEST_SCALE.get(policy, e4m3.MAX)).to(weight.device)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // group_size, dtype=torch.uint8, device=weight.device)
    choose, weighted = POLICIES[policy], policy == "quasar"
    importance = saliency.view(-1, group_size) if weighted and saliency is not None else None

    def fill(chunk: slice) -> None:
        blocks = (weight[chunk].float() * divisor).view(-1, columns // group_size, group_size)
        scales[chunk] = choose(blocks.abs(), importance)
        nearest = e2m1.encode(divide(blocks, e4m3.decode(scales[chunk]).unsqueeze(-1)))
        codes[chunk] = e2m1.pack(nearest.view(-1, columns))

    if hessian is None:
        for_row_chunks(rows, columns, fill)
    else:
        scaled = weight.float() * divisor
        unpacked, found = quantize_compensated(scaled, hessian, choose, group_size, weighted=weighted)
        codes, scales = e2m1.pack(unpacked), found.contiguous()
    row_factor = (1 / divisor).expand(rows).clone()
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), row_factor, group_size)


def _expect_columns(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and (tensor.dtype != torch.float32 or tuple(tensor.shape) != shape):
        raise ValueError(f"{name}: expected float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
