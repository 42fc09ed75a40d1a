"""NVFP4 ops on the CPU, with every instruction set that this machine has, against NVFP4Tensor in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.tensor import NVFP4Tensor
from tests.quant.reference import E4M3_NAN, E4M3_NUMBERS

OPS = torch.ops.voltserve


def matrix(rows: int, columns: int, group_size: int = 16, seed: int = 0) -> NVFP4Tensor:
    """Every code and every block scale but NaN occurs; row factors differ over six orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    scales = torch.randint(E4M3_NAN, (rows, columns // group_size), generator=random, dtype=torch.uint8)
    factors = 10.0 ** torch.randint(-4, 3, (rows,), generator=random).float() * 1.37
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), factors, group_size)


def packed(w: NVFP4Tensor) -> tuple[Any, ...]:
    """The operands of the ops that stand for `w`."""
    return (*OPS.nvfp4_pack(w.codes, w.block_scales, w.group_size), w.row_factor, w.group_size)


def worst_error(y: torch.Tensor, x: torch.Tensor, w: NVFP4Tensor, bias: torch.Tensor | None = None) -> float:
    """max |y - x Wᵀ - b| / (|x| |W|ᵀ + |b|), with the right side in float64: 0 for no elements."""
    exact = w.dequantize(torch.float32).double()
    expected, size = x.double() @ exact.T, x.double().abs() @ exact.T.abs()
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    error = (y.double() - expected).abs() / size.clamp(min=1e-300)
    return error.max().item() if error.numel() else 0.0


@given(
    rows=st.integers(1, 70),
    groups=st.integers(1, 9),
    group_size=st.sampled_from([16, 32]),
    m=st.integers(0, 20),
    seed=st.integers(0, 2**31),
    with_bias=st.booleans(),
)
# The fixture holds throughout, so examples may share it.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_is_exact_to_float32(
    instruction_set: str, rows: int, groups: int, group_size: int, m: int, seed: int, with_bias: bool
) -> None:
    w = matrix(rows, groups * group_size, group_size, seed)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(m, groups * group_size, generator=random)
    bias = torch.randn(rows, generator=random) if with_bias else None
    y = OPS.nvfp4_linear(x, *packed(w), bias)
    assert y.shape == (m, rows)
    assert worst_error(y, x, w, bias) < 1e-6


@pytest.mark.parametrize(("m", "rows", "columns"), [(1, 4096, 4096), (8, 576, 1536), (65, 960, 576), (4096, 48, 64)])
def test_sizes_of_real_layers_are_within_the_contract(instruction_set: str, m: int, rows: int, columns: int) -> None:
    if instruction_set == "portable":
        m = min(m, 65)
    w = matrix(rows, columns)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1))
    assert worst_error(OPS.nvfp4_linear(x, *packed(w)), x, w) < 1e-6


def test_a_spike_in_the_activations_does_not_swallow_its_neighbours(instruction_set: str) -> None:
    """Weights of 0 under the spike: what is left must be as exact as without it."""
    w = matrix(32, 64)
    codes = w.codes.clone()
    codes[:, 5] &= 0xF0  # column 10
    w = NVFP4Tensor(codes, w.block_scales, w.row_factor, 16)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    x[:, 10] = 1e4
    assert worst_error(OPS.nvfp4_linear(x, *packed(w)), x, w) < 1e-6


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dequantizing_gives_the_reference_bit_for_bit(
    instruction_set: str, group_size: int, dtype: torch.dtype
) -> None:
    w = matrix(33, 160, group_size)
    got = OPS.nvfp4_dequantize(*packed(w), dtype)
    assert got.dtype == dtype
    assert torch.equal(got, w.dequantize(dtype))


def test_every_code_times_every_scale_sign_included(instruction_set: str) -> None:
    """16 codes in a group, one scale byte a row: all 254 bytes that are numbers."""
    scales = torch.tensor(E4M3_NUMBERS, dtype=torch.uint8)
    codes = torch.arange(0, 16, 2, dtype=torch.uint8) | torch.arange(1, 17, 2, dtype=torch.uint8) << 4
    w = NVFP4Tensor(
        codes.repeat(len(scales), 1), scales.view(torch.float8_e4m3fn)[:, None], torch.ones(len(scales)), 16
    )
    assert torch.equal(OPS.nvfp4_dequantize(*packed(w), torch.float32), w.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_activations_are_summed_in_float32(dtype: torch.dtype) -> None:
    w = matrix(40, 96)
    w = NVFP4Tensor(w.codes, w.block_scales, torch.full((40,), 1e-3), 16)
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(40).to(dtype)
    y = OPS.nvfp4_linear(x, *packed(w), bias)
    assert y.dtype == dtype
    exact = x.double() @ w.dequantize(torch.float32).double().T + bias.double()
    assert torch.allclose(y.double(), exact.to(dtype).double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_strided_and_many_dimensional_activations() -> None:
    w = matrix(24, 32)
    operands = packed(w)
    wide = torch.randn(2, 3, 64)
    for x in (wide[..., ::2], wide[..., 16:48], wide.transpose(0, 1)[..., :32], wide[0, 0, :32]):
        y = OPS.nvfp4_linear(x, *operands)
        assert y.shape == (*x.shape[:-1], 24)
        assert worst_error(y.reshape(-1, 24), x.reshape(-1, 32), w) < 1e-6


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_activations_give_no_results(shape: tuple[int, ...]) -> None:
    assert OPS.nvfp4_linear(torch.empty(shape), *packed(matrix(24, 32))).shape == (*shape[:-1], 24)


def test_a_matrix_without_rows() -> None:
    w = matrix(0, 32)
    assert OPS.nvfp4_linear(torch.ones(2, 32), *packed(w)).shape == (2, 0)
    assert OPS.nvfp4_dequantize(*packed(w), torch.float32).shape == (0, 32)


def test_packing_keeps_one_copy_of_the_same_size_up_to_a_tile() -> None:
    w = matrix(33, 64)
    codes, scales, *_ = packed(w)
    assert (codes.shape, scales.shape) == ((48, 32), (48, 4))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", torch.ones(2, 48), r"x: expected \[..., 32\] on the CPU, got Float \[2, 48\]"),
        ("x", torch.ones(2, 32, dtype=torch.float64), "x: expected Float, Half or BFloat16, got Double"),
        ("x", torch.ones(()), r"x: expected \[..., 32\]"),
        ("packed", torch.zeros(32, 16, dtype=torch.int8), r"packed: expected contiguous Byte \[32, 16\]"),
        ("packed", torch.zeros(24, 16, dtype=torch.uint8), r"packed: .* got Byte \[24, 16\]"),
        ("packed", torch.zeros(16, 32, dtype=torch.uint8).T, "packed: .* got non-contiguous"),
        ("scales", torch.zeros(32, 2, dtype=torch.uint8), "scales: expected contiguous Float8_e4m3fn"),
        ("row_factor", torch.ones(24, 1), r"row_factor: expected contiguous Float \[any\]"),
        ("row_factor", torch.ones(40), r"scales: expected contiguous Float8_e4m3fn \[48, any\]"),
        ("group_size", 8, "group_size: expected 16 or 32, got 8"),
        ("bias", torch.ones(23), r"bias: expected contiguous Float \[24\] on the CPU, got Float \[23\]"),
        ("bias", torch.ones(24, dtype=torch.float16), r"bias: expected contiguous Float \[24\].*got Half \[24\]"),
    ],
)
def test_a_bad_argument_is_named(argument: str, value: object, message: str) -> None:
    codes, scales, row_factor, group_size = packed(matrix(24, 32))
    arguments = {
        "x": torch.ones(2, 32),
        "packed": codes,
        "scales": scales,
        "row_factor": row_factor,
        "group_size": group_size,
        "bias": None,
    }
    with pytest.raises(RuntimeError, match=message):
        OPS.nvfp4_linear(**{**arguments, argument: value})


def test_packing_names_what_does_not_fit() -> None:
    w = matrix(4, 32)
    scales = w.block_scales.view(torch.uint8).clone()
    scales[2, 1] = E4M3_NAN
    with pytest.raises(RuntimeError, match=r"block_scales: expected numbers, got NaN at \[2, 1\]"):
        OPS.nvfp4_pack(w.codes, scales.view(torch.float8_e4m3fn), 16)
    with pytest.raises(RuntimeError, match=r"block_scales: expected contiguous Float8_e4m3fn \[4, 1\]"):
        OPS.nvfp4_pack(w.codes, w.block_scales, 32)
    with pytest.raises(RuntimeError, match=r"codes: expected K a multiple of 32, got K = 48"):
        OPS.nvfp4_pack(torch.zeros(4, 24, dtype=torch.uint8), w.block_scales, 32)


def test_tracing_knows_shapes_and_dtypes() -> None:
    """On tensors without data, as torch.compile traces: leading dimensions and dtype as the kernels give them."""
    codes, scales, row_factor, group_size = packed(matrix(24, 32))
    meta = [tensor.to("meta") for tensor in (codes, scales, row_factor)]
    y = OPS.nvfp4_linear(torch.empty(5, 7, 32, dtype=torch.bfloat16, device="meta"), *meta, group_size)
    assert (y.shape, y.dtype) == ((5, 7, 24), torch.bfloat16)
    w = OPS.nvfp4_dequantize(*meta, group_size, torch.float16)
    assert (w.shape, w.dtype) == ((24, 32), torch.float16)
    arguments = (torch.ones(2, 32), codes, scales, row_factor, group_size)
    torch.library.opcheck(OPS.nvfp4_linear, arguments, test_utils="test_faketensor")
