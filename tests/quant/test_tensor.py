import numpy as np
import pytest
import torch

from quant import parallel
from quant.tensor import NVFP4Tensor
from tests.quant.reference import E2M1, E4M3_NAN, e4m3_value


def random_tensor(rows: int = 6, columns: int = 64, group_size: int = 16, seed: int = 0) -> NVFP4Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, E4M3_NAN, (rows, columns // group_size), generator=generator, dtype=torch.uint8)
    return NVFP4Tensor(
        codes, scales.view(torch.float8_e4m3fn), torch.rand(rows, generator=generator) + 0.01, group_size
    )


def reference_values(tensor: NVFP4Tensor) -> np.ndarray:
    values = np.concatenate([E2M1, -E2M1])
    rows, columns = tensor.shape
    out = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            byte = int(tensor.codes[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            scale = int(tensor.block_scales.view(torch.uint8)[row, column // tensor.group_size])
            out[row, column] = values[code] * e4m3_value(scale) * float(tensor.row_factor[row])
    return out


@pytest.mark.parametrize("group_size", [16, 32])
def test_dequantizing_multiplies_code_block_scale_and_row_factor(group_size):
    tensor = random_tensor(group_size=group_size)

    # Code times scale is exact; the factor is one float32 product, which rounds once.
    np.testing.assert_array_equal(tensor.dequantize().numpy(), reference_values(tensor).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantizing_to_16_bits_rounds_the_float32_values(dtype):
    tensor = random_tensor()

    assert torch.equal(tensor.dequantize(dtype), tensor.dequantize().to(dtype))


def test_dequantizing_in_small_chunks_changes_nothing(monkeypatch):
    tensor = random_tensor(rows=7)
    whole = tensor.dequantize()
    monkeypatch.setattr(parallel, "CHUNK_ELEMENTS", 2 * 64)

    assert torch.equal(tensor.dequantize(), whole)


def test_negative_zero_survives_dequantizing():
    tensor = random_tensor(rows=1, columns=16)
    negative_zeros = NVFP4Tensor(torch.full_like(tensor.codes, 0x88), tensor.block_scales, tensor.row_factor, 16)

    assert negative_zeros.dequantize().signbit().all()


def test_an_empty_tensor_dequantizes_to_nothing():
    assert random_tensor(rows=0).dequantize().shape == (0, 64)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("group_size", 64, r"group_size: expected 16 or 32, got 64"),
        ("codes", torch.zeros(6, 32, dtype=torch.int8), r"codes: expected uint8 \[N, K/2\], got int8 \[6, 32\]"),
        ("codes", torch.zeros(6, dtype=torch.uint8), r"codes: expected uint8 \[N, K/2\], got uint8 \[6\]"),
        ("codes", torch.zeros(6, 20, dtype=torch.uint8), r"codes: expected K a multiple of 16, got K=40"),
        (
            "block_scales",
            torch.zeros(6, 4),
            r"block_scales: expected float8_e4m3fn \[6, 4\] on cpu, got float32 \[6, 4\]",
        ),
        (
            "block_scales",
            torch.zeros(6, 2).to(torch.float8_e4m3fn),
            r"block_scales: expected .*\[6, 4\].*got .*\[6, 2\]",
        ),
        ("row_factor", torch.zeros(6, dtype=torch.float16), r"row_factor: expected float32 \[6\] on cpu, got float16"),
        ("row_factor", torch.zeros(1), r"row_factor: expected float32 \[6\] on cpu, got float32 \[1\]"),
        ("row_factor", torch.zeros(6, device="meta"), r"row_factor: expected .* on cpu, got .* on meta"),
    ],
)
def test_a_wrong_argument_is_named_with_expected_and_got(argument, value, message):
    tensor = random_tensor()
    arguments = {
        "codes": tensor.codes,
        "block_scales": tensor.block_scales,
        "row_factor": tensor.row_factor,
        "group_size": 16,
        argument: value,
    }

    with pytest.raises(ValueError, match=message):
        NVFP4Tensor(**arguments)
