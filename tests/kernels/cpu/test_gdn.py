"""Gated DeltaNet's ops on the CPU, with every instruction set that this machine has, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tools import gdn_reference

OPS = torch.ops.voltserve
KEY_HEADS, VALUE_HEADS, DIM, SLOTS = 2, 6, 16, 5
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM


@dataclass
class Step:
    """A step's requests as both the ops and the reference take them."""

    lengths: list[int]
    slots: list[int]
    continued: list[bool]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.tensor([[slot, 99] for slot in self.slots], dtype=torch.int32).view(-1, 2)[:, 0],  # a table's column
            torch.tensor(self.starts, dtype=torch.int32),
            torch.tensor(self.continued, dtype=torch.bool),
        )


@dataclass
class Layer:
    """A layer's weights and caches; `state` and `conv_state` are pages of a larger cache, some way apart."""

    weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor


def layer(seed: int = 0, dim: int = DIM) -> Layer:
    random = torch.Generator().manual_seed(seed)
    channels = (2 * KEY_HEADS + VALUE_HEADS) * dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    pages = normal(SLOTS, 7 + 3 * channels)[:, 7:].unflatten(1, (3, channels))
    states = normal(SLOTS, VALUE_HEADS * dim * dim + 3)[:, : VALUE_HEADS * dim * dim]
    return Layer(
        normal(channels, 4),
        normal(VALUE_HEADS),
        normal(VALUE_HEADS),
        pages,
        states.unflatten(1, (VALUE_HEADS, dim, dim)),
    )


def inputs(tokens: int, seed: int = 1, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [tokens, C] as a part of wider rows, a and b [tokens, heads] as halves of one tensor."""
    random = torch.Generator().manual_seed(seed)
    channels = (2 * KEY_HEADS + VALUE_HEADS) * dim
    x = torch.randn(tokens, channels + 5, generator=random)[:, :channels]
    b, a = torch.randn(tokens, 2 * VALUE_HEADS, generator=random).mul(3).chunk(2, dim=1)
    return x, a, b


STEPS = [
    Step([1], [3], [True]),
    Step([9], [0], [False]),
    Step([1, 1, 1], [4, 0, 2], [True, True, True]),
    Step([5, 1, 0, 33], [1, 3, 0, 2], [False, True, True, True]),
    Step([2, 1], [-1, 2], [True, False]),
    Step([], [], []),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.lengths}")
def test_the_convolution_is_exact_to_float32(instruction_set: str, step: Step) -> None:
    made = layer()
    x, _, _ = inputs(sum(step.lengths))
    expected_state = made.conv_state.clone()
    expected = gdn_reference.causal_conv1d(x, made.weight, expected_state, step.slots, step.starts, step.continued)
    y = OPS.causal_conv1d(x, made.weight, made.conv_state, *step.tensors)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(made.conv_state, expected_state)


@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.lengths}")
def test_the_delta_rule_is_exact_to_float32(instruction_set: str, step: Step, dim: int) -> None:
    made = layer(dim=dim)
    tokens = sum(step.lengths)
    qkv, a, b = inputs(tokens, dim=dim)
    expected_state = made.state.double()
    expected = gdn_reference.gated_delta_rule(
        qkv, a, b, made.a_log, made.dt_bias, expected_state, step.slots, step.starts, step.continued, KEY_HEADS
    )
    out = torch.full((tokens, VALUE_HEADS, dim), torch.nan)
    OPS.gated_delta_rule(qkv, a, b, made.a_log, made.dt_bias, made.state, *step.tensors, KEY_HEADS, out)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(made.state.double(), expected_state, rtol=2e-5, atol=2e-5)


def test_one_token_a_request_needs_no_starts(instruction_set: str) -> None:
    """What a captured graph replays: padding's slots are negative, and its rows zero."""
    step = Step([1, 1, 1, 1], [2, 0, -1, -1], [True] * 4)
    slots, starts, continued = step.tensors
    x, a, b = inputs(4)
    made, other = layer(), layer()
    y = OPS.causal_conv1d(x, made.weight, made.conv_state, slots)
    assert torch.equal(y, OPS.causal_conv1d(x, other.weight, other.conv_state, slots, starts, continued))
    outs = [torch.full((4, VALUE_HEADS, DIM), torch.nan) for _ in range(2)]
    OPS.gated_delta_rule(y, a, b, made.a_log, made.dt_bias, made.state, slots, None, None, KEY_HEADS, outs[0])
    OPS.gated_delta_rule(y, a, b, made.a_log, made.dt_bias, other.state, slots, starts, continued, KEY_HEADS, outs[1])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(made.state, other.state)
    assert torch.equal(made.conv_state, other.conv_state)
    assert not outs[0][2:].any()
    assert not y[2:].any()


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_request_in_parts_is_the_request_at_once(lengths: list[int]) -> None:
    """As chunked prefill cuts it: the caches carry everything, to the last bit."""
    tokens = sum(lengths)
    x, a, b = inputs(tokens)
    at_once, in_parts = layer(), layer()

    def run(made: Layer, part: slice, *, continued: bool) -> torch.Tensor:
        length = len(x[part])
        step = Step([length], [1], [continued])
        y = OPS.causal_conv1d(x[part], made.weight, made.conv_state, *step.tensors)
        out = torch.empty(length, VALUE_HEADS, DIM)
        OPS.gated_delta_rule(y, a[part], b[part], made.a_log, made.dt_bias, made.state, *step.tensors, KEY_HEADS, out)
        return out

    expected = run(at_once, slice(0, tokens), continued=False)
    starts = Step(lengths, [], []).starts
    parts = [run(in_parts, slice(start, end), continued=start > 0) for start, end in pairwise(starts)]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(in_parts.state, at_once.state)
    assert torch.equal(in_parts.conv_state, at_once.conv_state)


def test_an_unused_slot_is_left_alone(instruction_set: str) -> None:
    made = layer()
    before = replace(made, state=made.state.clone(), conv_state=made.conv_state.clone())
    step = Step([3, 1], [2, 4], [False, True])
    x, a, b = inputs(4)
    y = OPS.causal_conv1d(x, made.weight, made.conv_state, *step.tensors)
    out = torch.empty(4, VALUE_HEADS, DIM)
    OPS.gated_delta_rule(y, a, b, made.a_log, made.dt_bias, made.state, *step.tensors, KEY_HEADS, out)
    for slot in (0, 1, 3):
        assert torch.equal(made.state[slot], before.state[slot])
        assert torch.equal(made.conv_state[slot], before.conv_state[slot])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, CHANNELS).double()}, r"x: expected Float \[any, any\] on the CPU"),
        ({"x": torch.zeros(CHANNELS, 2).T}, "x: expected contiguous rows"),
        ({"weight": torch.zeros(CHANNELS, 3)}, rf"weight: expected contiguous Float \[{CHANNELS}, 4\]"),
        ({"state": torch.zeros(SLOTS, 2, CHANNELS)}, rf"state: expected Float \[any, 3, {CHANNELS}\]"),
        (
            {"slots": torch.tensor([0, SLOTS], dtype=torch.int32)},
            rf"slots: expected below {SLOTS}, got {SLOTS} at \[1\]",
        ),
        ({"slots": torch.tensor([0], dtype=torch.int32)}, r"slots: expected Int \[2\]"),
    ],
    ids=["dtype", "columns apart", "taps", "state", "slot", "requests"],
)
def test_bad_arguments_of_the_convolution_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "x": torch.zeros(2, CHANNELS),
        "weight": torch.zeros(CHANNELS, 4),
        "state": torch.zeros(SLOTS, 3, CHANNELS),
        "slots": torch.tensor([0, 1], dtype=torch.int32),
    } | change
    with pytest.raises(RuntimeError, match=message):
        OPS.causal_conv1d(*arguments.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(SLOTS, VALUE_HEADS, DIM, 8)}, "state: expected V = K, got V = 16, K = 8"),
        ({"state": torch.zeros(SLOTS, VALUE_HEADS, DIM, DIM).half()}, "state: expected Float"),
        ({"key_heads": 4}, "state: expected value heads a multiple of 4, got value heads = 6"),
        ({"a": torch.zeros(2, 5)}, r"a: expected Float \[2, 6\]"),
        ({"dt_bias": torch.zeros(6).half()}, r"dt_bias: expected contiguous Float \[6\]"),
        ({"out": torch.zeros(2, 6, 8)}, r"out: expected contiguous Float \[2, 6, 16\]"),
    ],
    ids=["not square", "16-bit state", "heads", "gates", "16-bit bias", "out"],
)
def test_bad_arguments_of_the_delta_rule_are_named(change: dict[str, object], message: str) -> None:
    arguments = {
        "qkv": torch.zeros(2, CHANNELS),
        "a": torch.zeros(2, VALUE_HEADS),
        "b": torch.zeros(2, VALUE_HEADS),
        "a_log": torch.zeros(VALUE_HEADS),
        "dt_bias": torch.zeros(VALUE_HEADS),
        "state": torch.zeros(SLOTS, VALUE_HEADS, DIM, DIM),
        "slots": torch.tensor([0, 1], dtype=torch.int32),
        "starts": None,
        "continued": None,
        "key_heads": KEY_HEADS,
        "out": torch.zeros(2, VALUE_HEADS, DIM),
    } | change
    with pytest.raises(RuntimeError, match=message):
        OPS.gated_delta_rule(*arguments.values())
