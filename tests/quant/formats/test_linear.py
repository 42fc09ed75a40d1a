from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.formats import compressed_tensors, modelopt
from quant.formats.gguf_nvfp4 import read_matrix
from quant.formats.linear import exact_reciprocal, is_all_zero, read_linear, write_linear
from quant.tensor import NVFP4Tensor
from tests.quant.formats.test_gguf_nvfp4 import as_tensor, block
from tests.quant.reference import E4M3_NAN

FLOAT32: dict[str, Any] = {"width": 32, "allow_nan": False, "allow_infinity": False}


@st.composite
def stored_linears(draw):
    """(codes, scales, global) of a linear as a file may hold it: any codes, any scale but NaN, any usable global."""
    rows, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    group_size = draw(st.sampled_from([16, 32]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    codes = torch.from_numpy(random.integers(0, 256, (rows, blocks * group_size // 2), dtype=np.uint8))
    scales = torch.from_numpy(random.integers(0, E4M3_NAN, (rows, blocks), dtype=np.uint8))
    scale = draw(st.floats(2.0**-100, 2.0**100, **FLOAT32))
    return codes, scales.view(torch.float8_e4m3fn), torch.tensor([scale]), group_size


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([compressed_tensors.LAYOUT, modelopt.LAYOUT]).flatmap(
        lambda layout: st.tuples(st.just(layout), stored_linears())
    )
)
def test_what_a_file_may_hold_is_read_and_written_back_to_the_same_values(case):
    layout, (codes, scales, stored, group_size) = case
    tensors = {layout.codes: codes, layout.scales: scales, layout.global_scale: stored}

    first = read_linear(layout, tensors, "layer", group_size)
    again = read_linear(layout, write_linear(layout, first, "layer"), "layer", group_size)

    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.block_scales.view(torch.uint8), again.block_scales.view(torch.uint8))
    assert torch.equal(first.row_factor, again.row_factor)


@settings(max_examples=500, deadline=None)
@given(st.floats(2.0**-120, 2.0**120, **FLOAT32))
def test_every_divisor_s_multiplier_finds_a_divisor_again(divisor):
    multiplier = 1 / torch.tensor([divisor])

    again = exact_reciprocal(multiplier)

    assert again is not None
    assert torch.equal(1 / again, multiplier)


@settings(max_examples=500, deadline=None)
@given(st.floats(2.0**-120, 2.0**120, **FLOAT32))
def test_a_reciprocal_is_exact_or_none(number):
    found = exact_reciprocal(torch.tensor([number]))

    assert found is None or torch.equal(1 / found, torch.tensor([number]))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_codes_and_scales_survive_gguf_s_order_of_nibbles(rows, blocks, seed):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (rows, 64 * blocks))
    scales = random.integers(0, E4M3_NAN, (rows, 4 * blocks))
    raw = [
        b"".join(
            block(scales[r, 4 * b : 4 * b + 4].tolist(), codes[r, 64 * b : 64 * b + 64].tolist()) for b in range(blocks)
        )
        for r in range(rows)
    ]

    matrix = read_matrix(as_tensor(raw), 64 * blocks, 1.0, "w")

    np.testing.assert_array_equal(matrix.codes.numpy() & 0xF, codes[:, 0::2])
    np.testing.assert_array_equal(matrix.codes.numpy() >> 4, codes[:, 1::2])
    np.testing.assert_array_equal(matrix.block_scales.view(torch.uint8).numpy(), scales)


@pytest.mark.parametrize(
    ("codes", "scale", "expected"),
    [
        (0x00, 0x38, True),
        (0x88, 0x38, True),
        (0x80, 0x38, True),
        (0x01, 0x38, False),
        (0x70, 0x38, False),
        (0x77, 0x00, True),
    ],
)
def test_zero_is_told_by_codes_and_scales(codes, scale, expected):
    scales = torch.tensor([[scale]], dtype=torch.uint8).view(torch.float8_e4m3fn)

    assert is_all_zero(torch.full((1, 8), codes, dtype=torch.uint8), scales) == expected


def test_a_tensor_whose_rows_differ_is_written_by_no_layout():
    tensor = NVFP4Tensor(
        torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1).to(torch.float8_e4m3fn), torch.tensor([1.0, 2.0]), 16
    )

    for layout in (compressed_tensors.LAYOUT, modelopt.LAYOUT):
        with pytest.raises(ValueError, match="qkv: expected one factor for all rows, got several"):
            write_linear(layout, tensor, "qkv")
