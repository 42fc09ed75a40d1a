"""The layers around the NVFP4 GEMMs on the CPU, with every instruction set of this machine, against torch."""

from __future__ import annotations

import pytest
import torch
import voltserve_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

OPS = torch.ops.voltserve


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (131, 576), (258, 48)])
def test_a_product_with_16_bit_weights_is_exact_to_float32(
    instruction_set: str, dtype: torch.dtype, m: int, rows: int, columns: int
) -> None:
    random = torch.Generator().manual_seed(m)
    x = torch.randn(m, columns, generator=random)
    weight = torch.randn(rows, columns, generator=random).to(dtype)
    y = OPS.linear16(x, weight)
    error = (y.double() - x.double() @ weight.double().T).abs()
    assert y.shape == (m, rows)
    assert torch.all(error <= 1e-6 * (x.double().abs() @ weight.double().abs().T))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_read_exactly(instruction_set: str, dtype: torch.dtype) -> None:
    """Each number on the diagonal of a matrix of its own: subnormal, infinite and NaN ones too."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    numbers = bits.view(dtype)
    weight = torch.zeros(2**16, 16, dtype=dtype)
    weight[:, 3] = numbers
    x = torch.zeros(1, 16)
    x[0, 3] = 1
    y = OPS.linear16(x, weight)[0]
    # An infinite number times the other columns' zeros is not a number, in no order of summing.
    assert torch.equal(y[numbers.isfinite()], numbers[numbers.isfinite()].float())
    assert not y[~numbers.isfinite()].isfinite().any()


@pytest.mark.parametrize("shape", [(1, 576), (5, 576), (3, 2, 37), (1, 5), (0, 16), (40, 4096)])
def test_rms_norm(instruction_set: str, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    x, weight = torch.randn(shape, generator=random) * 3, torch.rand(shape[-1], generator=random) + 0.5
    expected = functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 576), (3, 2, 37), (0, 16), (40, 4096)])
def test_add_rms_norm_leaves_the_sum_in_the_residual(instruction_set: str, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(2)
    x, residual = torch.randn(shape, generator=random), torch.randn(shape, generator=random)
    weight = torch.rand(shape[-1], generator=random) + 0.5
    total = x + residual
    OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    expected = functional.rms_norm(total.double(), shape[-1:], weight.double(), 1e-6)
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 3072), (7, 62), (2, 3, 10), (0, 32), (300, 128)])
def test_silu_and_mul(instruction_set: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 8
    a, b = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(OPS.silu_and_mul(x).double(), functional.silu(a) * b, rtol=2e-6, atol=1e-7)


def test_silu_far_from_zero_neither_overflows_nor_underflows_into_nan(instruction_set: str) -> None:
    a = torch.tensor([-3e38, -200.0, -88.5, -87.0, 0.0, 87.0, 88.5, 200.0, 3e38]).repeat(4)
    expected = functional.silu(a.double())
    got = OPS.silu_and_mul(torch.cat([a, torch.ones_like(a)])).double()
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("linear16", (torch.ones(2, 32), torch.ones(4, 32)), "weight: expected Half or BFloat16, got Float"),
        ("linear16", (torch.ones(2, 24), torch.ones(4, 24).half()), "weight: expected K a multiple of 16, got K = 24"),
        ("linear16", (torch.ones(2, 16), torch.ones(4, 32).half()), r"x: expected contiguous Float \[any, 32\]"),
        ("linear16", (torch.ones(2, 32).half(), torch.ones(4, 32).half()), r"x: .* got Half \[2, 32\]"),
        ("rms_norm", (torch.ones(2, 8), torch.ones(9), 1e-5), r"weight: expected contiguous Float \[8\]"),
        ("rms_norm", (torch.ones(8, 2).T, torch.ones(8), 1e-5), "x: expected contiguous .* got non-contiguous"),
        ("add_rms_norm", (torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5), r"residual: expected .* \[2, 8\]"),
        ("silu_and_mul", (torch.ones(2, 7),), r"x: expected \[..., 2 n\], got Float \[2, 7\]"),
        ("silu_and_mul", (torch.ones(2, 8).half(),), r"x: expected contiguous Float \[2, 8\].* got Half"),
    ],
)
def test_a_bad_argument_is_named(op: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(OPS, op)(*arguments)


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    names = " ".join(voltserve_kernels.cpu_instruction_sets())
    with pytest.raises(RuntimeError, match=f"name: expected one of {names}, got sse9"):
        OPS._use_cpu_instruction_set("sse9")


def test_tracing_knows_shapes_and_dtypes() -> None:
    """Implementations for tensors without data say what the kernels do."""
    x, weight = torch.ones(3, 32), torch.ones(32)
    for op, arguments in (
        (OPS.linear16, (x, torch.ones(5, 32, dtype=torch.float16))),
        (OPS.rms_norm, (x, weight, 1e-5)),
        (OPS.add_rms_norm, (x, torch.ones(3, 32), weight, 1e-5)),
        (OPS.silu_and_mul, (x,)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_tracing_knows_every_op_that_only_writes() -> None:
    """They need no fake of their own: the schema says all."""
    cache = torch.zeros(2, 1, 8, 16)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        rows, slots = fake(torch.ones(3, 1, 8)), fake(torch.zeros(3, dtype=torch.int64))
        assert OPS.reshape_and_cache(rows, rows, fake(cache), fake(cache), slots) is None
        assert OPS.rms_norm_to(fake(torch.ones(3, 32)), fake(torch.ones(3, 32)), fake(torch.ones(32)), 1e-5) is None
