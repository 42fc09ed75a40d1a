import numpy as np
import pytest
import torch

from quant import e2m1
from tests.quant.reference import E2M1, E4M3_NUMBERS, e4m3_value, nearest_index, with_neighbours


def expected_codes(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return (nearest_index(E2M1, np.abs(wide)) | np.signbit(wide) << 3).astype(np.uint8)


def test_every_float16_gets_the_nearest_code_with_ties_to_even_and_its_sign():
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)]

    codes = e2m1.encode(torch.from_numpy(values))

    assert codes.dtype == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), expected_codes(values))


def test_the_float32_neighbours_of_every_value_and_midpoint_fall_on_the_right_side():
    points = np.concatenate([E2M1, (E2M1[1:] + E2M1[:-1]) / 2, [7.0, 1e30]])
    values = with_neighbours(np.concatenate([points, -points]))

    codes = e2m1.encode(torch.from_numpy(values))

    np.testing.assert_array_equal(codes.numpy(), expected_codes(values))


def test_float64_is_refused_since_it_would_be_rounded_twice():
    with pytest.raises(TypeError, match=r"x: expected .*float32, got torch\.float64"):
        e2m1.encode(torch.zeros(1, dtype=torch.float64))


def test_bfloat16_is_encoded_like_the_same_numbers_in_float32():
    values = torch.linspace(-8, 8, 4001).to(torch.bfloat16)

    assert torch.equal(e2m1.encode(values), e2m1.encode(values.float()))


def test_infinity_saturates_and_negative_zero_is_code_8():
    assert e2m1.encode(torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, -0.1])).tolist() == [7, 15, 8, 0, 8]


def test_nan_is_refused_with_its_index():
    with pytest.raises(ValueError, match=r"NaN at index \[1, 0\]"):
        e2m1.encode(torch.tensor([[0.0], [torch.nan]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_code_decodes_exactly_and_encodes_back_to_itself(dtype):
    codes = torch.arange(16, dtype=torch.uint8)

    values = e2m1.decode(codes, dtype)

    assert values.dtype == dtype
    np.testing.assert_array_equal(values.double().numpy(), np.concatenate([E2M1, -E2M1]))
    assert torch.equal(e2m1.encode(values), codes)


def test_code_times_block_scale_is_exact_in_float16_for_every_pair():
    codes = torch.arange(16, dtype=torch.uint8)
    for scale in E4M3_NUMBERS:
        product = e2m1.decode(codes, torch.float16) * torch.tensor(e4m3_value(scale), dtype=torch.float16)
        assert product.double().tolist() == (np.concatenate([E2M1, -E2M1]) * e4m3_value(scale)).tolist(), hex(scale)


def test_the_even_column_is_packed_in_the_low_nibble():
    assert e2m1.pack(torch.tensor([[0x3, 0xA, 0xF, 0x0]], dtype=torch.uint8)).tolist() == [[0xA3, 0x0F]]


def test_unpacking_and_packing_gives_back_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)

    codes = e2m1.unpack(packed)

    assert codes.shape == (16, 32)
    assert int(codes.max()) == 15
    assert torch.equal(e2m1.pack(codes), packed)
