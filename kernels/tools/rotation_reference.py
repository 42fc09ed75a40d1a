"""The exact result of rotate_and_cache (kernels/contracts/attention.h) in float64, and the allowed error."""

from __future__ import annotations

import torch


def rotated_heads(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    halves: bool,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact result, allowed error) of heads x [T, H, D], both float64 [T, H, D]; the other arguments as the op's.

    float16's roundings are allowed: 2^-11 each, 2^-25 for the smallest numbers. They occur at the normalized value, at
    that times the weight, at each product of the rotation and at their sum.
    """
    exact = x.double()
    allowed = torch.zeros_like(exact)
    if weight is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
        exact = exact * weight.double()
        allowed = exact.abs() * 2.0**-10 + (1 + weight.double().abs()) * 2.0**-25
    rotated = cos_sin.shape[1]
    angles = cos_sin[positions].double()[:, None]
    cos, sin = angles[..., : rotated // 2], angles[..., rotated // 2 :]

    def parts(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = of[..., :rotated]
        return (
            (turned[..., : rotated // 2], turned[..., rotated // 2 :])
            if halves
            else (turned[..., ::2], turned[..., 1::2])
        )

    def whole(first: torch.Tensor, second: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((first, second), -1) if halves else torch.stack((first, second), -1).flatten(-2)
        return torch.cat((turned, rest[..., rotated:]), -1)

    (a, b), (a_off, b_off) = parts(exact), parts(allowed)
    result = whole(a * cos - b * sin, b * cos + a * sin, exact)
    rounding = 2.0**-10
    off = [
        one_off * cos.abs()
        + other_off * sin.abs()
        + ((one * cos).abs() + (other * sin).abs()) * rounding
        + 3 * 2.0**-25
        for one, other, one_off, other_off in ((a, b, a_off, b_off), (b, a, b_off, a_off))
    ]
    # For float32's sum of squares, and for products of roundings.
    return result, whole(off[0], off[1], allowed) * (1 + 2.0**-8)
