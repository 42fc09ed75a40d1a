"""Activations, each writing to a tensor that vLLM has made: x [..., I], or with a gate [..., 2 I], to out [..., I]."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]

gelu_tanh = partial(functional.gelu, approximate="tanh")


def alone(activate: Activation) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """out = activate(x)."""

    def compute(out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(activate(x))

    return compute


def gated(activate: Activation, *, gate_first: bool = True) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """out = activate(gate) * up. The gate is x's first half, or its second one."""

    def compute(out: torch.Tensor, x: torch.Tensor) -> None:
        first, second = x.chunk(2, dim=-1)
        gate, up = (first, second) if gate_first else (second, first)
        torch.mul(activate(gate), up, out=out)

    return compute


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x), in float32."""
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def relu_squared(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = max(x, 0)²."""
    torch.square(functional.relu(x), out=out)


def fat_relu(out: torch.Tensor, x: torch.Tensor, threshold: float) -> None:
    """out = gate * up, and 0 where the gate is at most `threshold`."""
    gate, up = x.chunk(2, dim=-1)
    torch.mul(functional.threshold(gate, threshold, 0.0), up, out=out)


def clamped_silu(out: torch.Tensor, x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> None:
    """out = g sigmoid(alpha g) (u + beta), g and u being x's halves, g at most `limit`, u between -limit and limit."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    out.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))


def swiglu_oai(out: torch.Tensor, x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """gpt-oss's: `clamped_silu` with beta 1, and gate and up alternate in x."""
    clamped_silu(out, torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), limit, alpha, 1.0)


def situ(out: torch.Tensor, x: torch.Tensor, beta: float = 1.0, linear_beta: float = -1.0) -> None:
    """out = beta tanh(g / beta) sigmoid(g) u, g and u being x's halves.

    A positive `linear_beta` bounds u, too: linear_beta tanh(u / linear_beta).
    """
    gate, up = x.float().chunk(2, dim=-1)
    if linear_beta > 0:
        up = linear_beta * torch.tanh(up / linear_beta)
    out.copy_(beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up)
