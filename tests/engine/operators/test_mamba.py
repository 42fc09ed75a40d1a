from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import (
    _mamba_chunk_scan_combined_fwd_cpu,
    selective_state_update,
)

HEADS, DIM, GROUPS, STATES = 4, 6, 2, 5
LENGTHS = (1, 63, 64, 65, 200)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "x": numbers(tokens, HEADS, DIM, seed=seed + 1),
        "dt": numbers(tokens, HEADS, seed=seed + 2),
        "A": -numbers(HEADS, seed=3).exp(),
        "B": numbers(tokens, GROUPS, STATES, seed=seed + 4),
        "C": numbers(tokens, GROUPS, STATES, seed=seed + 5),
        "D": numbers(HEADS, seed=6),
        "dt_bias": numbers(HEADS, seed=7),
    }


def one_by_one(given: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in float64, token after token: y [T, H, P] and the last state [H, P, N]."""
    wide = {name: part.double() for name, part in given.items()}
    state, ys = state.double(), []
    for token in range(len(given["x"])):
        step = functional.softplus(wide["dt"][token] + wide["dt_bias"])
        b, c = (wide[name][token].repeat_interleave(HEADS // GROUPS, 0) for name in ("B", "C"))
        x = wide["x"][token]
        state = (step * wide["A"]).exp()[:, None, None] * state + torch.einsum("h,hp,hn->hpn", step, x, b)
        ys.append(torch.einsum("hpn,hn->hp", state, c) + wide["D"][:, None] * x)
    return torch.stack(ys), state


@pytest.mark.parametrize("continued", [False, True])
def test_prompts_are_the_recurrence(continued: bool) -> None:
    given = parts(sum(LENGTHS))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    before = numbers(len(LENGTHS), HEADS, DIM, STATES, seed=9) if continued else None
    out = torch.full_like(given["x"], torch.nan)
    after = _mamba_chunk_scan_combined_fwd_cpu(
        chunk_size=256, out=out, initial_states=before, cu_seqlens=starts, dt_softplus=True, **given
    )
    for request, (begin, end) in enumerate(pairwise(starts.tolist())):
        own = {name: part if name in "AD" or name == "dt_bias" else part[begin:end] for name, part in given.items()}
        state = torch.zeros(HEADS, DIM, STATES) if before is None else before[request]
        y, last = one_by_one(own, state)
        torch.testing.assert_close(out[begin:end].double(), y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after[request].double(), last, rtol=1e-4, atol=1e-4)


def test_a_token_is_a_step_of_the_recurrence_and_padding_is_left_alone() -> None:
    given = parts(3)
    states = numbers(8, HEADS, DIM, STATES, seed=11)
    before, slots, targets = states.clone(), torch.tensor([5, 0, 2]).int(), torch.tensor([6, 0, 2]).int()
    out = torch.full_like(given["x"], 7.0)
    expanded = {
        "A": given["A"][:, None, None].expand(-1, DIM, STATES),
        "dt": given["dt"][..., None].expand(-1, -1, DIM),
        "D": given["D"][:, None].expand(-1, DIM),
        "dt_bias": given["dt_bias"][:, None].expand(-1, DIM),
    }
    selective_state_update(
        states,
        **{**given, **expanded},
        dt_softplus=True,
        state_batch_indices=slots,
        dst_state_batch_indices=targets,
        null_block_id=0,
        out=out,
    )
    for row in (0, 2):
        own = {name: part if name in "AD" or name == "dt_bias" else part[row : row + 1] for name, part in given.items()}
        y, last = one_by_one(own, before[slots[row]])
        torch.testing.assert_close(out[row].double(), y[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[targets[row]].double(), last, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[1], torch.full_like(out[1], 7.0))
    assert torch.equal(states[[0, 1, 5]], before[[0, 1, 5]])


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tokens_one_by_one_are_convolved_as_a_prompt(activation: str | None, with_bias: bool) -> None:
    width, channels, tokens = 4, 6, 9
    weight, bias = numbers(channels, width, seed=1), numbers(channels, seed=2) if with_bias else None
    x = numbers(channels, tokens, seed=3)
    starts, slot = torch.tensor([0, tokens]), torch.tensor([3])
    states = numbers(5, channels, width - 1, seed=4)
    once = states.clone()
    whole = causal_conv1d_fn_cpu(x, weight, bias, once, starts, slot, torch.tensor([True]), activation)
    others = states[[0, 1, 2, 4]].clone()
    for token in range(tokens):
        rows = torch.stack([x[:, token], x[:, token]])
        y = causal_conv1d_update_cpu(rows, states, weight, bias, activation, torch.tensor([3, 0]).int())
        torch.testing.assert_close(y[0], whole[:, token], rtol=1e-5, atol=1e-5)
        assert torch.equal(y[1], rows[1])  # of nobody
    torch.testing.assert_close(states[3], once[3])
    assert torch.equal(states[[0, 1, 2, 4]], others)


def test_drafts_are_refused() -> None:
    x, states = numbers(4, 6, seed=1), torch.zeros(2, 6, 3)
    with pytest.raises(NotImplementedError, match=r"one new token.*--speculative-config"):
        causal_conv1d_update_cpu(x, states, numbers(6, 4, seed=2), query_start_loc=torch.tensor([0, 3, 4]).int())
