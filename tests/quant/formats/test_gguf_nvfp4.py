import numpy as np
import pytest
import torch

from quant.errors import QuantError
from quant.formats.gguf_nvfp4 import read_matrix
from tests.quant.reference import E2M1, E4M3_NAN, e4m3_value

VALUES = np.concatenate([E2M1, -E2M1])


def block(scales: list[int], codes: list[int]) -> bytes:
    """64 elements as ggml lays them out: element j and j + 8 of each 16 share a byte."""
    packed = b""
    for start in range(0, 64, 16):
        own = codes[start : start + 16]
        packed += bytes(own[j] | own[j + 8] << 4 for j in range(8))
    return bytes(scales) + packed


def as_tensor(rows: list[bytes]) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def test_a_block_written_by_hand_is_read_exactly():
    codes = [n * 5 % 16 for n in range(64)]
    scales = [0x38, 0x01, 0x7E, 0x40]

    matrix = read_matrix(as_tensor([block(scales, codes)]), 64, 0.5, "blk.0.attn_q.weight")

    expected = VALUES[codes] * np.repeat([e4m3_value(scale) for scale in scales], 16) * 0.5
    np.testing.assert_array_equal(matrix.dequantize()[0].double().numpy(), expected)


def test_rows_of_several_blocks_follow_each_other():
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (3, 128))
    scales = random.integers(0, E4M3_NAN, (3, 8))
    rows = [
        b"".join(
            block(scales[r, 4 * b : 4 * b + 4].tolist(), codes[r, 64 * b : 64 * b + 64].tolist()) for b in range(2)
        )
        for r in range(3)
    ]

    matrix = read_matrix(as_tensor(rows), 128, 1.0, "w")

    factors = np.vectorize(e4m3_value)(scales).repeat(16, axis=1)
    np.testing.assert_array_equal(matrix.dequantize().double().numpy(), VALUES[codes] * factors)


def test_the_scale_that_is_nan_elsewhere_is_0_here():
    assert not read_matrix(as_tensor([block([E4M3_NAN] * 4, [7] * 64)]), 64, 1.0, "w").dequantize().any()


@pytest.mark.parametrize(
    ("data", "columns", "multiplier", "message"),
    [
        (
            as_tensor([block([0x38, 0xB8, 0, 0], [1] * 64)]),
            64,
            1.0,
            r"w: expected scales without a sign, got 0xB8 at \[0, 1\]",
        ),
        (
            torch.zeros(1, 35, dtype=torch.uint8),
            64,
            1.0,
            r"w: expected uint8 \[N, 64 / 64 \* 36\], got torch.uint8 \[1, 35\]",
        ),
        (torch.zeros(1, 36, dtype=torch.uint8), 48, 1.0, r"w: expected uint8 \[N, 48 / 64"),
        (torch.zeros(1, 36), 64, 1.0, r"got torch.float32 \[1, 36\]"),
        (torch.zeros(1, 36, dtype=torch.uint8), 64, 0.0, "w: expected a positive scale, got 0.0"),
        (torch.zeros(1, 36, dtype=torch.uint8), 64, float("nan"), "w: expected a positive scale, got nan"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_tensor(data, columns, multiplier, message):
    with pytest.raises(QuantError, match=message):
        read_matrix(data, columns, multiplier, "w")
