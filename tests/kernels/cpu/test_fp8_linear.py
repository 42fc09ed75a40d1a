"""FP8 ops on the CPU, with every instruction set that this machine has, against FP8Tensor in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.tensor import FP8Tensor
from tests.quant.reference import E4M3_NANS, E4M3_NUMBERS

OPS = torch.ops.voltserve
BLOCK = 128


def matrix(rows: int, columns: int, group_size: int, seed: int = 0) -> FP8Tensor:
    """Every code but NaN occurs; scales differ over six orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(E4M3_NUMBERS, dtype=torch.uint8)
    codes = numbers[torch.randint(len(numbers), (rows, columns), generator=random)]
    scales = 10.0 ** torch.randint(-4, 3, (rows, -(-columns // group_size)), generator=random).float() * 1.37
    return FP8Tensor(codes.view(torch.float8_e4m3fn), scales, group_size)


def packed(w: FP8Tensor) -> tuple[Any, ...]:
    """The operands of fp8_linear that stand for `w`."""
    return (*OPS.fp8_pack(w.codes, w.scales, w.group_size), w.shape[0], w.group_size)


def dequantized(w: FP8Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, scales, rows, group_size = packed(w)
    made: torch.Tensor = OPS.fp8_dequantize(codes, scales, rows, w.shape[1], group_size, dtype)
    return made


def worst_error(y: torch.Tensor, x: torch.Tensor, w: FP8Tensor, bias: torch.Tensor | None = None) -> float:
    """max |y - x Wᵀ - b| / (|x| |W|ᵀ + |b|), with the right side in float64: 0 for no elements."""
    exact = w.dequantize(torch.float32).double()
    expected, size = x.double() @ exact.T, x.double().abs() @ exact.T.abs()
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    error = (y.double() - expected).abs() / size.clamp(min=1e-300)
    return error.max().item() if error.numel() else 0.0


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 20).map(lambda count: 16 * count),
    in_blocks=st.booleans(),
    m=st.integers(0, 20),
    seed=st.integers(0, 2**31),
    with_bias=st.booleans(),
)
# The fixture holds throughout, so examples may share it.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_is_exact_to_float32(
    instruction_set: str, rows: int, columns: int, in_blocks: bool, m: int, seed: int, with_bias: bool
) -> None:
    w = matrix(rows, columns, BLOCK if in_blocks else columns, seed)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(m, columns, generator=random)
    bias = torch.randn(rows, generator=random) if with_bias else None
    y = OPS.fp8_linear(x, *packed(w), bias)
    assert y.shape == (m, rows)
    assert worst_error(y, x, w, bias) < 1e-6


@pytest.mark.parametrize(("m", "rows", "columns"), [(1, 2048, 2048), (8, 576, 1536), (65, 960, 576)])
def test_sizes_of_real_layers_are_within_the_contract(instruction_set: str, m: int, rows: int, columns: int) -> None:
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1))
    for group_size in (columns, BLOCK):
        w = matrix(rows, columns, group_size)
        assert worst_error(OPS.fp8_linear(x, *packed(w)), x, w) < 1e-6


@pytest.mark.parametrize("group_size", [BLOCK, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dequantizing_gives_the_reference_bit_for_bit(
    instruction_set: str, group_size: int, dtype: torch.dtype
) -> None:
    w = matrix(33, 160, group_size)
    got = dequantized(w, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, w.dequantize(dtype))


def test_every_code_is_its_number_sign_and_subnormals_included(instruction_set: str) -> None:
    codes = torch.tensor([*E4M3_NUMBERS, 0, 0], dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    w = FP8Tensor(codes, torch.ones(1, 1), 256)
    assert torch.equal(dequantized(w, torch.float32), codes.float())
    product = OPS.fp8_linear(torch.eye(256), *packed(w))
    assert torch.equal(product[:, 0], codes[0].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_activations_are_summed_in_float32(dtype: torch.dtype) -> None:
    w = matrix(40, 96, 96)
    w = FP8Tensor(w.codes, torch.full((40, 1), 1e-3), 96)
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(40).to(dtype)
    y = OPS.fp8_linear(x, *packed(w), bias)
    assert y.dtype == dtype
    exact = x.double() @ w.dequantize(torch.float32).double().T + bias.double()
    assert torch.allclose(y.double(), exact.to(dtype).double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_strided_and_many_dimensional_activations() -> None:
    w = matrix(24, 32, 32)
    operands = packed(w)
    wide = torch.randn(2, 3, 64)
    for x in (wide[..., ::2], wide[..., 16:48], wide.transpose(0, 1)[..., :32], wide[0, 0, :32]):
        y = OPS.fp8_linear(x, *operands)
        assert y.shape == (*x.shape[:-1], 24)
        assert worst_error(y.reshape(-1, 24), x.reshape(-1, 32), w) < 1e-6


def test_no_activations_and_no_rows_give_no_results() -> None:
    assert OPS.fp8_linear(torch.empty(2, 0, 32), *packed(matrix(24, 32, 32))).shape == (2, 0, 24)
    assert OPS.fp8_linear(torch.ones(2, 32), *packed(matrix(0, 32, 32))).shape == (2, 0)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", torch.ones(2, 48), r"x: expected \[..., 32\] on the CPU, got Float \[2, 48\]"),
        ("x", torch.ones(2, 32, dtype=torch.float64), "x: expected Float, Half or BFloat16, got Double"),
        ("packed", torch.zeros(32, 32, dtype=torch.int8), r"packed: expected contiguous Byte \[32, 32\]"),
        ("packed", torch.zeros(1024, dtype=torch.uint8), r"packed: expected \[N', K\]"),
        ("scales", torch.zeros(32, 2), r"scales: expected contiguous Float \[32, 1\]"),
        ("rows", 40, r"packed: expected contiguous Byte \[48, 32\]"),
        ("group_size", 16, "group_size: expected K=32 or 128, got 16"),
        ("bias", torch.ones(23), r"bias: expected contiguous Float \[24\] on the CPU, got Float \[23\]"),
    ],
)
def test_a_bad_argument_is_named(argument: str, value: object, message: str) -> None:
    codes, scales, rows, group_size = packed(matrix(24, 32, 32))
    arguments = {
        "x": torch.ones(2, 32),
        "packed": codes,
        "scales": scales,
        "rows": rows,
        "group_size": group_size,
        "bias": None,
    }
    with pytest.raises(RuntimeError, match=message):
        OPS.fp8_linear(**{**arguments, argument: value})


@pytest.mark.parametrize("nan", E4M3_NANS)
def test_packing_names_what_does_not_fit(nan: int) -> None:
    w = matrix(4, 32, 32)
    codes = w.codes.view(torch.uint8).clone()
    codes[2, 1] = nan
    with pytest.raises(RuntimeError, match=r"codes: expected numbers, got NaN at \[2, 1\]"):
        OPS.fp8_pack(codes.view(torch.float8_e4m3fn), w.scales, 32)
    with pytest.raises(RuntimeError, match=r"scales: expected contiguous Float \[4, 1\]"):
        OPS.fp8_pack(w.codes, torch.ones(4, 2), 32)
    with pytest.raises(RuntimeError, match=r"codes: expected K a multiple of 16, got K = 24"):
        OPS.fp8_pack(torch.zeros(4, 24).to(torch.float8_e4m3fn), torch.ones(4, 1), 24)


def test_tracing_knows_shapes_and_dtypes() -> None:
    """On tensors without data, as torch.compile traces: leading dimensions and dtype as the kernels give them."""
    codes, scales, rows, group_size = packed(matrix(24, 32, 32))
    meta = [tensor.to("meta") for tensor in (codes, scales)]
    y = OPS.fp8_linear(torch.empty(5, 7, 32, dtype=torch.bfloat16, device="meta"), *meta, rows, group_size)
    assert (y.shape, y.dtype) == ((5, 7, 24), torch.bfloat16)
    w = OPS.fp8_dequantize(*meta, rows, 32, group_size, torch.float16)
    assert (w.shape, w.dtype) == ((24, 32), torch.float16)
    arguments = (torch.ones(2, 32), codes, scales, rows, group_size)
    torch.library.opcheck(OPS.fp8_linear, arguments, test_utils="test_faketensor")
