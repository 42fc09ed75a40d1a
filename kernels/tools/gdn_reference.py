"""The ops of a Gated DeltaNet layer (contracts/gdn.h) in float64, token by token, with torch on the CPU."""

from __future__ import annotations

import torch
from torch.nn import functional

TAPS = 4


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: list[int],
    starts: list[int],
    continued: list[bool],
) -> torch.Tensor:
    """y float64 [T, C] of x [T, C], weight [C, 4]; updates state [S, 3, C], which may be of any dtype."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for request, slot in enumerate(slots):
        tokens = x[starts[request] : starts[request + 1]].double()
        if slot < 0 or not len(tokens):
            continue
        past = state[slot].double() if continued[request] else tokens.new_zeros(TAPS - 1, x.shape[1])
        inputs = torch.cat([past, tokens])
        windows = inputs.unfold(0, TAPS, 1)  # [tokens, C, 4]
        y[starts[request] : starts[request + 1]] = functional.silu((windows * weight.double()).sum(-1))
        state[slot] = inputs[-(TAPS - 1) :].to(state.dtype)
    return y


def gated_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: list[int],
    starts: list[int],
    continued: list[bool],
    key_heads: int,
) -> torch.Tensor:
    """out float64 [T, value_heads, V]; updates state float64 [S, value_heads, V, K]."""
    value_heads, dim = state.shape[1], state.shape[3]
    copies = value_heads // key_heads
    wide = qkv.double().view(len(qkv), 2 * key_heads + value_heads, dim)
    q = _unit(wide[:, :key_heads]).repeat_interleave(copies, dim=1) * dim**-0.5
    k = _unit(wide[:, key_heads : 2 * key_heads]).repeat_interleave(copies, dim=1)
    v = wide[:, 2 * key_heads :]
    decay = torch.exp(-a_log.double().exp() * functional.softplus(a.double() + dt_bias.double()))
    beta = torch.sigmoid(b.double())
    out = torch.zeros(len(qkv), value_heads, dim, dtype=torch.float64, device=qkv.device)
    for request, slot in enumerate(slots):
        if slot < 0 or starts[request] == starts[request + 1]:
            continue
        s = state[slot].clone() if continued[request] else torch.zeros_like(state[slot])
        for t in range(starts[request], starts[request + 1]):
            s = s * decay[t, :, None, None]
            recalled = (s @ k[t, :, :, None])[..., 0]
            s = s + (beta[t, :, None] * (v[t] - recalled))[..., None] * k[t, :, None, :]
            out[t] = (s @ q[t, :, :, None])[..., 0]
        state[slot] = s
    return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
