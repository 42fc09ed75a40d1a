"""Policies that choose the E4M3 scale of each block of weights.

Input: magnitudes m, float32 [R, B, g], already multiplied by the global divisor (R rows of B blocks of g). With them
the importance i of each column, float32 [B, g], or None where all weigh the same. Output: E4M3 codes, uint8 [R, B].

The policies compare errors under the scale as it will be stored. A block's error is the sum of i * (m - scale * q)^2,
where q is the E2M1 value nearest to m / scale.

maxabs    e4m3(max / 6): the block's largest magnitude becomes 6.
mse       the E4M3 codes from 3 below to 7 above maxabs', a range that holds the optimum (ScaleSweep, arXiv 2606.07618).
fourosix  e4m3(max / 6) or e4m3(max / 4), the one with less error ("4/6", arXiv 2512.02010). E2M1 has a gap from 4 to 6.
quasar    after QUASAR (arXiv 2608.13966). For each of a few clip ratios r:
              round to codes q under the scale r * max / 6;
              fit the scale by least squares, weighted with saliency: s = sum(i * m * q) / sum(i * q^2);
              round s to E4M3, round the weights again under it, and compare that error.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch

from quant import e2m1, e4m3
from quant.formats.quantize_config import ScalePolicy

ChooseScales = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]

# The zero offset first: another scale must be strictly better to replace maxabs.
SWEEP_OFFSETS = tuple(sorted(range(-3, 8), key=abs))
# Below 1 the largest weights are clipped; above 1 they move to finer steps (1.5 maps the largest to 4).
CLIP_RATIOS = (1.0, 0.8, 0.9, 1.12, 1.25, 1.38, 1.5, 1.7)


def divide(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """blocks / scale, signs kept. 0 where the scale is 0: a block too small for any scale is all zeros."""
    return blocks / torch.where(scale > 0, scale, math.inf)


def maxabs(magnitudes: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """maxabs, as the module's docstring defines it. Ignores importance."""
    return _nearest_code(magnitudes.amax(-1) / e2m1.MAX)


def mse(magnitudes: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """mse, as the module's docstring defines it."""
    base = maxabs(magnitudes)
    candidates = ((base.int() + offset).clamp_(0, e4m3.MAX_CODE).to(torch.uint8) for offset in SWEEP_OFFSETS)
    return _best(magnitudes, importance, candidates)


def fourosix(magnitudes: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """fourosix, as the module's docstring defines it."""
    largest = magnitudes.amax(-1)
    return _best(magnitudes, importance, (_nearest_code(largest / target) for target in (6.0, 4.0)))


def quasar(magnitudes: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """quasar, as the module's docstring defines it. Raises ValueError without importance, which is its saliency."""
    if importance is None:
        raise ValueError("importance: expected float32 [B, g] for the quasar policy, got None")
    # A block whose columns have no importance at all is fitted as if all had the same.
    importance = torch.where((importance > 0).any(-1, keepdim=True), importance, 1.0)
    largest = magnitudes.amax(-1)
    return _best(magnitudes, importance, _fitted_scales(magnitudes, importance, largest))


def _fitted_scales(magnitudes: torch.Tensor, importance: torch.Tensor, largest: torch.Tensor) -> Iterator[torch.Tensor]:
    yield _nearest_code(largest / e2m1.MAX)
    weighted = magnitudes * importance
    for ratio in CLIP_RATIOS:
        rounded = e2m1.round_magnitudes(divide(magnitudes, (largest * (ratio / e2m1.MAX)).unsqueeze(-1)))
        fitted = (weighted * rounded).sum(-1) / (importance * rounded.square()).sum(-1)
        # 0 / 0 where all codes of important columns are zero: there is nothing to fit.
        yield _nearest_code(fitted.nan_to_num(0.0))


def _best(
    magnitudes: torch.Tensor, importance: torch.Tensor | None, candidates: Iterable[torch.Tensor]
) -> torch.Tensor:
    """The candidate (uint8 [R, B] each) with the least error, per block. The first one wins a tie."""
    best = torch.zeros(magnitudes.shape[:-1], dtype=torch.uint8, device=magnitudes.device)
    least = torch.full(best.shape, math.inf, device=magnitudes.device)
    for candidate in candidates:
        scale = e4m3.decode(candidate).unsqueeze(-1)
        error = e2m1.round_magnitudes(divide(magnitudes, scale)).mul_(scale).sub_(magnitudes).square_()
        total = error.sum(-1) if importance is None else error.mul_(importance).sum(-1)
        better = total < least
        best = torch.where(better, candidate, best)
        least = torch.where(better, total, least)
    return best


def _nearest_code(scale: torch.Tensor) -> torch.Tensor:
    return e4m3.encode(scale).view(torch.uint8)


POLICIES: dict[ScalePolicy, ChooseScales] = {"maxabs": maxabs, "mse": mse, "fourosix": fourosix, "quasar": quasar}
# The scale of the block that holds a tensor's largest weight. It is 448, E4M3's maximum, unless the method needs room
# above it: 256 * 6/4 = 384 is an E4M3 value, 448 * 6/4 is not (arXiv 2512.02010).
LARGEST_SCALE: dict[ScalePolicy, float] = {"fourosix": 256.0}
