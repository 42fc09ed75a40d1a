"""Quantizing a matrix to NVFP4: a global factor, E4M3 block scales by a policy, E2M1 codes.

With y = w * divisor (the global), a block's maxabs scale is e4m3(max|y| / 6). That scale is rarely the best one: `mse`
tries the E4M3 codes from 3 below to 7 above it and keeps the least squared error, a range shown to hold the optimum
(ScaleSweep, arXiv 2606.07618).
"""

import math
from collections.abc import Callable

import torch

from quant import e2m1, e4m3
from quant.errors import QuantError
from quant.formats.quantize_config import ScalePolicy
from quant.parallel import for_row_chunks
from quant.tensor import GROUP_SIZES, NVFP4Tensor

# The zero offset first: another scale must be strictly better to replace maxabs.
SWEEP_OFFSETS = tuple(sorted(range(-3, 8), key=abs))
# Keeps 1 / divisor a normal float32 for tensors of tiny numbers, which then lose those below about 1e-33.
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


def global_divisor(amax: float) -> torch.Tensor:
    """The float32 scalar by which weights are multiplied, so that the largest block scale becomes 448: 2688 / amax.

    It is stored as it is by compressed-tensors; its float32 reciprocal is `row_factor`. 1 for an all-zero tensor.
    """
    largest_scaled = e2m1.MAX * e4m3.MAX
    return torch.tensor(min(largest_scaled / amax, LARGEST_DIVISOR) if amax else 1.0, dtype=torch.float32)


def quantize_matrix(
    weight: torch.Tensor,
    *,
    policy: ScalePolicy = "mse",
    group_size: int = 16,
    amax: float | None = None,
    name: str = "weight",
) -> NVFP4Tensor:
    """Quantizes `weight` (float [N, K], K a multiple of group_size) to the nearest codes under the policy's scales.

    `amax` sets the global and must not be below max|w|: layers that an engine fuses share the largest of theirs.
    `name` is used in errors. Raises QuantError on NaN or Inf, ValueError on a wrong argument.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: expected 16 or 32, got {group_size}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] % group_size:
        raise ValueError(
            f"weight: expected float [N, multiple of {group_size}], got {weight.dtype} {list(weight.shape)}"
        )
    own = largest_magnitude(weight, name)
    if amax is None:
        amax = own
    if amax < own:
        raise ValueError(f"amax: expected at least max|{name}| = {own}, got {amax}")
    divisor = global_divisor(amax).to(weight.device)
    choose_scale_codes = POLICIES[policy]
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // group_size, dtype=torch.uint8, device=weight.device)

    def fill(chunk: slice) -> None:
        blocks = (weight[chunk].float() * divisor).view(-1, columns // group_size, group_size)
        scales[chunk] = choose_scale_codes(blocks.abs())
        scaled = _divide(blocks, e4m3.decode(scales[chunk]).unsqueeze(-1))
        codes[chunk] = e2m1.pack(e2m1.encode(scaled).view(-1, columns))

    for_row_chunks(rows, columns, fill)
    row_factor = (1 / divisor).expand(rows).clone()
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), row_factor, group_size)


def _maxabs(magnitudes: torch.Tensor) -> torch.Tensor:
    """Scale codes (uint8 [R, B]) that map each block's largest magnitude (float32 [R, B, g]) to about 6."""
    return e4m3.encode(magnitudes.amax(-1) / e2m1.MAX).view(torch.uint8)


def _mse(magnitudes: torch.Tensor) -> torch.Tensor:
    """Scale codes (uint8 [R, B]) with the least squared error among the candidates around maxabs."""
    base = _maxabs(magnitudes)
    best = base
    least = torch.full(base.shape, math.inf, device=base.device)
    for offset in SWEEP_OFFSETS:
        candidate = (base.int() + offset).clamp_(0, e4m3.MAX_CODE).to(torch.uint8)
        scale = e4m3.decode(candidate).unsqueeze(-1)
        rounded = e2m1.round_magnitudes(_divide(magnitudes, scale))
        error = rounded.mul_(scale).sub_(magnitudes).square_().sum(-1)
        better = error < least
        best = torch.where(better, candidate, best)
        least = torch.where(better, error, least)
    return best


def _divide(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """blocks / scale, with 0 where the scale is 0 (a block too small for any scale is all zeros), signs kept."""
    return blocks / torch.where(scale > 0, scale, math.inf)


POLICIES: dict[ScalePolicy, Callable[[torch.Tensor], torch.Tensor]] = {"maxabs": _maxabs, "mse": _mse}
