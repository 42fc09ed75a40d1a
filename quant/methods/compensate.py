"""Error compensation: columns are rounded one after another, and later columns absorb each one's error.

After GPTQ (arXiv 2210.17323). H is the sum of x x^T over calibration tokens [K, K], x being the layer's input. For
stored values v, the output error of a row w is (w - v) H (w - v)^T. Let U be the upper Cholesky factor of H's inverse.

    rounding column k leaves           w_k - v_k
    later columns absorb most of it:   w[k+1:] -= (w_k - v_k) / U_kk * U[k, k+1:]
    the output error that remains:     (w_k - v_k)^2 / U_kk^2

Blocks are those of the format. A block's scales are chosen when its first column is due, from the weights as
compensated so far. Each column weighs 1 / U_kk^2, its share of the remaining error. Blocks with large inputs are
rounded first, while most columns are left to absorb their errors.
"""

import torch

from quant import e2m1, e4m3
from quant.methods.scales import ChooseScales, divide

# Added to H's diagonal, as a fraction of its mean. Keeps the inverse stable where columns were rarely or never used.
DAMPING = 0.01


def compensation_factor(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """The upper triangular U, float32 [K, K], with U^T U = (H + damping * mean(diag H) * I)^-1 for H float32 [K, K].

    A Hessian of zeros (calibration never reached the layer) gives the identity: no compensation. Raises ValueError for
    a Hessian that is not square, not finite or, even damped, not positive definite.
    """
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1] or not bool(hessian.isfinite().all()):
        raise ValueError(f"hessian: expected finite [K, K], got {list(hessian.shape)}")
    identity = torch.eye(hessian.shape[0], dtype=torch.float64, device=hessian.device)
    mean = float(hessian.diagonal().double().mean())
    if mean == 0.0:
        return identity.float()
    lower, failed = torch.linalg.cholesky_ex(hessian.double() / mean + damping * identity)
    if int(failed):
        raise ValueError("hessian: expected a positive semidefinite matrix, got one that no Cholesky factor exists of")
    # The factor is that of H / mean. The constant cancels out of the compensation, and weighs all columns alike.
    upper: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper.float()


def quantize_compensated(
    weight: torch.Tensor, hessian: torch.Tensor, choose: ChooseScales, group_size: int, *, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8 [N, K], unpacked) and scale codes (uint8 [N, K/g]) of `weight`, float32 [N, K] times the divisor.

    `hessian` is float32 [K, K]. `choose` picks scales; it receives the columns' importance only if `weighted`.
    """
    rows, columns = weight.shape
    groups = hessian.diagonal().view(-1, group_size).sum(-1).argsort(descending=True, stable=True)
    order = (groups[:, None] * group_size + torch.arange(group_size, device=weight.device)).flatten()
    factor = compensation_factor(hessian[order][:, order])
    # Columns are rounded one by one, so they are laid out as rows.
    remaining = weight.t()[order]
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(columns // group_size, rows, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns, group_size):
        stop = start + group_size
        block, local = remaining[start:stop], factor[start:stop, start:stop]
        importance = local.diagonal().square().reciprocal().unsqueeze(0) if weighted else None
        chosen = choose(block.t().abs().contiguous().unsqueeze(1), importance).squeeze(1)
        errors = _round_block(block, local, e4m3.decode(chosen))
        remaining[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
        group = groups[start // group_size]
        scales[group] = chosen
        codes[order[start:stop]] = e2m1.encode(divide(block, e4m3.decode(chosen)))
    return codes.t(), scales.t()


def _round_block(block: torch.Tensor, local: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rounds `block` (float32 [g, N]) in place, row by row (columns of the weight); later rows absorb each error.

    local: U's part [g, g]; scale: float32 [N]. Returns the errors over U's diagonal, float32 [g, N].
    """
    errors = torch.empty_like(block)
    for k in range(len(block)):
        wanted = block[k]
        value = e2m1.round_magnitudes(divide(wanted.abs(), scale)).mul_(scale).copysign_(wanted)
        errors[k] = (wanted - value) / local[k, k]
        block[k] = value
        block[k + 1 :].addr_(local[k, k + 1 :], errors[k], alpha=-1)
    return errors
