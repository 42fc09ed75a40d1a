import numpy as np
import pytest
import torch

from quant import e4m3
from tests.quant.reference import E4M3, e4m3_value, nearest_index, with_neighbours


def expected_codes(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return (nearest_index(E4M3, np.abs(wide)) | np.signbit(wide) << 7).astype(np.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_256_codes_decode_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8)

    values = e4m3.decode(codes, dtype)

    assert values.dtype == dtype
    np.testing.assert_array_equal(values.double().numpy(), [e4m3_value(code) for code in range(256)])
    np.testing.assert_array_equal(np.signbit(values[:127].double().numpy()), False)
    assert np.signbit(float(values[0x80]))


def test_the_constants_are_the_ends_of_the_grid():
    assert (E4M3[-1], E4M3[1]) == (e4m3.MAX, e4m3.SMALLEST)
    assert e4m3_value(e4m3.MAX_CODE) == e4m3.MAX


def test_every_float16_gets_the_nearest_code_with_ties_to_even_and_saturates():
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)]

    codes = e4m3.encode(torch.from_numpy(values)).view(torch.uint8)

    np.testing.assert_array_equal(codes.numpy(), expected_codes(values))


def test_the_float32_neighbours_of_every_value_and_midpoint_fall_on_the_right_side():
    points = np.concatenate([E4M3, (E4M3[1:] + E4M3[:-1]) / 2, [464.0, 1e30]])
    values = with_neighbours(np.concatenate([points, -points]))

    codes = e4m3.encode(torch.from_numpy(values)).view(torch.uint8)

    np.testing.assert_array_equal(codes.numpy(), expected_codes(values))


def test_infinity_saturates_and_nan_stays_nan():
    values = e4m3.decode(e4m3.encode(torch.tensor([torch.inf, -torch.inf, torch.nan])))

    assert values[:2].tolist() == [448.0, -448.0]
    assert values[2].isnan()


def test_float64_is_refused_since_it_would_be_rounded_twice():
    with pytest.raises(TypeError, match=r"x: expected .*float32, got torch\.float64"):
        e4m3.encode(torch.zeros(1, dtype=torch.float64))
