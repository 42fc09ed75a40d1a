"""Weights with known bits, and the exact result of a GEMM with them, in float64. Torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_NAN = 0x7F  # and with the sign, 0xFF
E4M3_NUMBERS = tuple(code for code in range(256) if code & E4M3_NAN != E4M3_NAN)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Canonical:
    """codes uint8 [n, k/2] (even column low), scales uint8 [n, k/group] (raw E4M3), row_factor float32 [n]."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_factor: torch.Tensor
    group: int

    def double(self) -> torch.Tensor:
        """The matrix [n, k] in float64."""
        table = torch.tensor(E2M1, dtype=torch.float64, device=self.codes.device)
        nibbles = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        scales = self.scales.view(torch.float8_e4m3fn).double().repeat_interleave(self.group, dim=1)
        return table[nibbles.long()] * scales * self.row_factor.double()[:, None]


def random_weights(n: int, k: int, group: int, generator: torch.Generator, adversarial: bool = False) -> Canonical:
    """Random codes; scales as checkpoints have them or, `adversarial`, every number of E4M3, negative ones too."""
    device = generator.device
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
    if adversarial:
        numbers = torch.tensor(E4M3_NUMBERS, dtype=torch.uint8, device=device)
        pick = torch.randint(0, len(numbers), (n, k // group), device=device, generator=generator)
        scales = numbers[pick]
        codes[:, ::7] = 0x88  # -0
        codes[:, 1::7] = 0x7F  # -6 and 6
    else:
        scales = torch.randint(0x50, E4M3_NAN, (n, k // group), dtype=torch.uint8, device=device, generator=generator)
    # Small enough that no result leaves fp16's range.
    factor = (torch.rand(n, device=device, generator=generator) + 0.1) * (1e-7 if adversarial else 1e-4)
    return Canonical(codes, scales, factor, group)


def random_activations(m: int, k: int, generator: torch.Generator, adversarial: bool = False) -> torch.Tensor:
    """fp16 [m, k]: normal; `adversarial`: with outliers at fp16's largest number and whole rows of subnormals."""
    x = torch.randn(m, k, device=generator.device, generator=generator).half()
    if adversarial:
        x[:, 3::97] = 65504.0
        x[:, 5::89] = -65504.0
        x[m // 2] = torch.tensor(2.0**-24, dtype=torch.float16)
    return x


def worst_error(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[float, str]:
    """The largest error of y fp16 [m, n] against x wᵀ + bias, in units of the allowed error, and where it is.

    Allowed: the rounding of the result to fp16, and 1e-5 of the sum of |x w| for fp32 sums in another order. At most 1
    passes; NaN never does.
    """
    exact = x.double() @ w.T
    if bias is not None:
        exact = exact + bias.double()
    allowed = exact.abs() * 2.0**-11 + 2.0**-25 + 1e-5 * (x.double().abs() @ w.T.abs())
    ratio = ((y.double() - exact).abs() / allowed).nan_to_num(nan=float("inf"))
    worst = int(ratio.argmax())
    row, column = divmod(worst, y.shape[1])
    detail = f"[{row}, {column}]: expected {exact[row, column]:.9g}, got {y[row, column]:.9g}"
    return float(ratio.max()), detail
