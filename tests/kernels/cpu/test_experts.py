"""nvfp4_moe_linear on the CPU, against each expert's matrix in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.layers.moe import pack_experts
from engine.layers.moe_slots import align

from .test_nvfp4_linear import OPS, matrix, worst_error


def operands(rows: int, columns: int, experts: int, group_size: int = 16) -> tuple[list[Any], tuple[Any, ...]]:
    """The experts' matrices, and the same as the op takes them."""
    matrices = [matrix(rows, columns, group_size, seed) for seed in range(experts)]
    codes, scales = (torch.stack([getattr(w, name) for w in matrices]) for name in ("codes", "block_scales"))
    factors = torch.stack([w.row_factor for w in matrices])
    return matrices, (*pack_experts(codes, scales, group_size), factors, group_size)


@given(
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    group_size=st.sampled_from([16, 32]),
    experts=st.integers(1, 7),
    tokens=st.integers(0, 19),
    block=st.sampled_from([1, 3, 8, 64]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_slot_goes_through_its_expert(
    instruction_set: str,
    rows: int,
    groups: int,
    group_size: int,
    experts: int,
    tokens: int,
    block: int,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, experts))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    matrices, weights = operands(rows, groups * group_size, experts, group_size)
    x = torch.randn(tokens, groups * group_size, generator=random)
    ids = torch.rand(tokens, experts, generator=random).argsort(1)[:, :top_k]
    y = OPS.nvfp4_moe_linear(x, *weights, *align(ids, experts, block), top_k)
    assert y.shape == (tokens * top_k, rows)
    for slot, expert in enumerate(ids.flatten().tolist()):
        assert worst_error(y[slot : slot + 1], x[slot // top_k, None], matrices[expert]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_activations_are_summed_in_float32(dtype: torch.dtype) -> None:
    matrices, (packed, scales, _, group_size) = operands(24, 64, 3)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([[0], [2], [1], [2]])
    factors = torch.full((3, 24), 1e-3)
    y = OPS.nvfp4_moe_linear(x, packed, scales, factors, group_size, *align(ids, 3, 8), 1)
    assert y.dtype == dtype
    for token, expert in enumerate(ids.flatten().tolist()):
        w = (
            matrices[expert].dequantize().double()
            / matrices[expert].row_factor[:, None].double()
            * factors[0, 0].double()
        )
        exact = (x[token].double() @ w.T).to(dtype)
        assert torch.allclose(y[token].double(), exact.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", torch.ones(2, 48), r"x: expected contiguous Float \[any, 32\] on the CPU, got Float \[2, 48\]"),
        ("packed", torch.zeros(3, 16, 16, dtype=torch.uint8), r"packed: expected contiguous Byte \[3, 32, 16\]"),
        (
            "scales",
            torch.zeros(2, 32, 2).to(torch.float8_e4m3fn),
            r"scales: expected contiguous Float8_e4m3fn \[3, 32, any",
        ),
        ("row_factor", torch.ones(24), r"row_factor: expected contiguous Float \[any, any\]"),
        ("slots", torch.zeros(16, dtype=torch.int64), r"slots: expected contiguous Int \[any\]"),
        ("slots", torch.full((16,), -1, dtype=torch.int32), "slots: expected at least 0, got -1"),
        ("slots", torch.zeros(17, dtype=torch.int32), "slots: expected as many for each of the 2 blocks, got 17"),
        ("experts", torch.tensor([0, 3], dtype=torch.int32), "experts: expected 0 to 2, got 3"),
        ("experts", torch.tensor([0, -1], dtype=torch.int32), "experts: expected 0 to 2, got -1"),
        ("padded_slots", torch.tensor([24], dtype=torch.int32), "padded_slots: expected 0 to 16, got 24"),
        ("top_k", 0, "top_k: expected at least 1, got 0"),
        ("group_size", 8, "group_size: expected 16 or 32, got 8"),
    ],
)
def test_a_bad_argument_is_named(argument: str, value: object, message: str) -> None:
    _, (packed, scales, row_factor, group_size) = operands(24, 32, 3)
    slots, experts, padded_slots = align(torch.tensor([[0], [2]]), 3, 8)
    arguments = {
        "x": torch.ones(2, 32),
        "packed": packed,
        "scales": scales,
        "row_factor": row_factor,
        "group_size": group_size,
        "slots": slots,
        "experts": experts,
        "padded_slots": padded_slots,
        "top_k": 1,
    }
    assert OPS.nvfp4_moe_linear(*arguments.values()).shape == (2, 24)
    with pytest.raises(RuntimeError, match=message):
        OPS.nvfp4_moe_linear(**{**arguments, argument: value})


def test_tracing_knows_shapes_and_dtypes() -> None:
    _, weights = operands(24, 32, 3)
    arguments = (torch.ones(2, 32), *weights, *align(torch.tensor([[0, 1], [2, 0]]), 3, 8), 2)
    torch.library.opcheck(OPS.nvfp4_moe_linear, arguments, test_utils="test_faketensor")
