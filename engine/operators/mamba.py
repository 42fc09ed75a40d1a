"""State-space layers (Mamba-2) on CPUs. H heads of P numbers, G groups of N states; head h belongs to group h G / H.

For each token, head and dimension, with dt the token's step and A < 0 the head's rate:

    state [P, N] = exp(dt A) state + dt x Bᵀ        y [P] = state C + D x, times silu(z) if there is a gate z

Prompts: the recurrence over CHUNK tokens at once is a matrix product. With a_t = dt_1 A + … + dt_t A,

    y_t = Σ_{s ≤ t} exp(a_t - a_s) dt_s (C_t · B_s) x_s + exp(a_t) state C_t
"""

from itertools import pairwise

import torch
from torch.nn import functional

CHUNK = 64  # tokens
DRAFTS = "Mamba on CPUs: expected one new token per request, got drafts. Leave out --speculative-config"


def causal_conv1d_update(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    indices: torch.Tensor | None,
    query_start: torch.Tensor | None,
    nobody: int,
) -> torch.Tensor:
    """The convolution of one new token of each request: x [R, D] or [R, D, tokens] to its like.

    states [any, D, W - 1] hold a request's former inputs, newest last; request r's is indices[r]. weight [D, W].
    Requests at `nobody` are padding. Their rows are not changed.

    Raises:
        NotImplementedError: several tokens per request, which are drafts.
    """
    if query_start is not None and int(query_start.diff().max()) > 1:
        raise NotImplementedError(DRAFTS)
    slots = torch.arange(len(x)) if indices is None else indices.flatten()[: len(x)].long()
    rows = (slots != nobody).nonzero()[:, 0]
    slots, new = slots[rows], x[rows] if x.dim() == 3 else x[rows, :, None]
    width = weight.shape[1]
    window = torch.cat([states[slots, :, : width - 1].to(x.dtype), new], dim=-1)
    y = functional.conv1d(window, weight.to(x.dtype)[:, None], bias, groups=len(weight))
    states[slots, :, : width - 1] = window[..., 1 - width :].to(states.dtype)
    out = x.clone()
    out[rows] = (functional.silu(y) if activation in ("silu", "swish") else y).view(x[rows].shape)
    return out


def _per_head(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that vLLM has expanded over a head's dimensions, as float32 [H]."""
    while parameter.dim() > 1:
        parameter = parameter[..., 0]
    return parameter.float()


def selective_state_update(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    indices: torch.Tensor | None,
    to_indices: torch.Tensor | None,
    nobody: int,
    out: torch.Tensor,
    accepted: torch.Tensor | None,
    query_start: torch.Tensor | None,
) -> None:
    """One new token per request. Shapes: states [any, H, P, N]; x, z, out and dt [R, H, P]; b and c [R, G, N].

    Request r's state is read at indices[r] and written to to_indices[r]. Requests at `nobody` are padding.

    Raises:
        NotImplementedError: several tokens per request, which are drafts.
    """
    if accepted is not None or (query_start is not None and int(query_start.diff().max()) > 1):
        raise NotImplementedError(DRAFTS)
    slots = torch.arange(len(x)) if indices is None else indices.flatten()[: len(x)].long()
    rows = (slots != nobody).nonzero()[:, 0]
    targets = slots[rows] if to_indices is None else to_indices.flatten()[rows].long()
    step = dt[rows, :, 0] if dt.dim() == 3 else dt[rows]
    step = step.float() if dt_bias is None else step.float() + _per_head(dt_bias)
    step = functional.softplus(step) if softplus else step
    heads = x.shape[1]
    values = x[rows].float()
    wide_b, wide_c = (part[rows].float().repeat_interleave(heads // part.shape[1], 1) for part in (b, c))
    decay = torch.exp(step * _per_head(a))[..., None, None]
    state = states[slots[rows]].float() * decay + (step[..., None] * values)[..., None] * wide_b[:, :, None]
    y = (state @ wide_c[..., None])[..., 0]
    y = _finished(y, values, d, None if z is None else z[rows])
    states[targets] = state.to(states.dtype)
    out[rows] = y.to(out.dtype)


def _finished(y: torch.Tensor, x: torch.Tensor, d: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    """y [tokens, H, P] with the direct way D x, and the gate."""
    if d is not None:
        y = y + _per_head(d)[:, None] * x
    return y if z is None else y * functional.silu(z.float())


def chunk_scan(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    query_start: torch.Tensor,
) -> None:
    """Prompts one after another: out, x, z [T, H, P], dt float32 [T, H], b and c [T, G, N].

    states float32 [R, H, P, N] hold each request's state before its tokens, and are overwritten by that after them.
    """
    heads = x.shape[1]
    rate = _per_head(a)
    bounds = query_start.tolist()
    for request, (begin, end) in enumerate(pairwise(bounds)):
        for first in range(begin, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            values, step = x[rows].float(), dt[rows].float()
            wide_b, wide_c = (part[rows].float().repeat_interleave(heads // part.shape[1], 1) for part in (b, c))
            y = _chunk(values, step, step * rate, wide_b, wide_c, states[request])
            out[rows] = _finished(y, values, d, None if z is None else z[rows]).to(out.dtype)


def _chunk(
    x: torch.Tensor, dt: torch.Tensor, logs: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """y [T, H, P] of at most CHUNK tokens; `logs` are dt A. `state` [H, P, N] becomes the one after them."""
    along = logs.cumsum(0).T  # [H, T], a_t
    tokens = len(x)
    later = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    decay = (along[:, :, None] - along[:, None, :]).masked_fill(~later, -torch.inf).exp()  # [H, t, s]
    weighed = (dt[..., None] * x).transpose(0, 1)  # [H, T, P]
    by_head_b, by_head_c = b.transpose(0, 1), c.transpose(0, 1)  # [H, T, N]
    y = (decay * (by_head_c @ by_head_b.transpose(1, 2))) @ weighed
    y += along.exp()[..., None] * (by_head_c @ state.transpose(1, 2))
    to_end = (along[:, -1:] - along).exp()[..., None]  # [H, T, 1]
    state.mul_(along[:, -1].exp()[:, None, None]).add_((to_end * weighed).transpose(1, 2) @ by_head_b)
    return y.transpose(0, 1)
