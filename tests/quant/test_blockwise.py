import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant import e2m1, parallel
from quant.blockwise import global_divisor, quantize_matrix
from quant.errors import QuantError
from quant.formats.quantize_config import SCALE_POLICIES
from quant.methods.scales import LARGEST_SCALE, POLICIES
from tests.quant.reference import E2M1, E4M3, nearest_index


def random_weight(rows: int = 8, columns: int = 128, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) * 0.1
    return torch.randn(rows, columns, generator=generator) * spread


def options(policy: str, columns: int) -> dict[str, Any]:
    """The policy with what it needs: quasar weighs columns, here all alike."""
    return {"policy": policy, "saliency": torch.ones(columns) if policy == "quasar" else None}


def block_errors(weight: torch.Tensor, group_size: int, **options: Any) -> torch.Tensor:
    quantized = quantize_matrix(weight, group_size=group_size, **options)
    return (quantized.dequantize().double() - weight.double()).square().view(-1, group_size).sum(-1)


def test_there_is_a_function_for_every_policy_that_the_config_names():
    assert tuple(POLICIES) == SCALE_POLICIES


def test_weights_on_the_grid_are_kept_exactly():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    weight = (e2m1.decode(codes) * torch.tensor([448.0] * 16 + [3.5] * 16) / 1024).view(1, 32)

    for policy in SCALE_POLICIES:
        quantized = quantize_matrix(weight, **options(policy, weight.shape[1]))
        torch.testing.assert_close(quantized.dequantize(), weight, rtol=1e-6, atol=0)
        largest = LARGEST_SCALE.get(policy, 448.0)
        assert quantized.block_scales.float().tolist() == [[largest, largest / 128]]
        assert torch.equal(e2m1.unpack(quantized.codes)[0], codes)


@pytest.mark.parametrize("policy", SCALE_POLICIES)
@pytest.mark.parametrize("group_size", [16, 32])
def test_every_code_is_the_nearest_under_the_scale_chosen(policy, group_size):
    weight = random_weight()

    quantized = quantize_matrix(weight, group_size=group_size, **options(policy, 128))

    divisor = global_divisor(float(weight.abs().max()), LARGEST_SCALE.get(policy, 448.0))
    scaled = (weight * divisor).view(-1, group_size)
    scaled = scaled / quantized.block_scales.float().view(-1, 1)
    expected = nearest_index(E2M1, scaled.abs().flatten().double().numpy())
    np.testing.assert_array_equal((e2m1.unpack(quantized.codes) & 7).flatten().numpy(), expected)


@pytest.mark.parametrize("group_size", [16, 32])
def test_maxabs_maps_each_block_s_largest_weight_to_six(group_size):
    weight = random_weight()

    quantized = quantize_matrix(weight, policy="maxabs", group_size=group_size)

    divisor = float(global_divisor(float(weight.abs().max())))
    wanted = weight.abs().view(-1, group_size).amax(-1).double().numpy() * divisor / 6
    expected = E4M3[nearest_index(E4M3, wanted)]
    np.testing.assert_array_equal(quantized.block_scales.double().flatten().numpy(), expected)


@pytest.mark.parametrize("group_size", [16, 32])
def test_mse_finds_the_least_error_of_all_127_scales(group_size):
    weight = random_weight(rows=4)
    divisor = float(global_divisor(float(weight.abs().max())))
    magnitudes = weight.abs().double().numpy().reshape(-1, group_size) * divisor
    least = np.full(len(magnitudes), np.inf)
    for scale in E4M3[1:]:
        rounded = E2M1[nearest_index(E2M1, (magnitudes / scale).ravel())].reshape(magnitudes.shape)
        least = np.minimum(least, ((rounded * scale - magnitudes) ** 2).sum(-1))

    errors = block_errors(weight, group_size, policy="mse").numpy() * divisor**2

    np.testing.assert_allclose(errors, least, rtol=1e-4)


def test_mse_is_never_worse_than_maxabs_in_any_block():
    weight = random_weight(rows=64)

    maxabs, mse = (block_errors(weight, 16, policy=policy) for policy in ("maxabs", "mse"))

    assert (mse <= maxabs * (1 + 1e-5)).all()
    assert mse.sum() < 0.8 * maxabs.sum()


def test_the_largest_weight_gets_the_largest_scale_and_the_divisor_s_reciprocal_is_the_factor():
    weight = random_weight()

    quantized = quantize_matrix(weight, policy="maxabs")

    assert float(quantized.block_scales.float().max()) == 448.0
    expected = 1 / np.float32(2688 / float(weight.abs().max()))
    assert quantized.row_factor.tolist() == [float(expected)] * 8


def test_a_shared_larger_amax_sets_the_factor():
    weight = random_weight()

    quantized = quantize_matrix(weight, amax=2.0)

    assert quantized.row_factor.tolist() == [float(1 / np.float32(1344.0))] * 8
    assert float((quantized.dequantize() - weight).norm() / weight.norm()) < 0.1


def test_an_amax_below_the_weights_own_is_refused():
    with pytest.raises(ValueError, match=r"amax: expected at least max\|q_proj\| = 2.0, got 1.0"):
        quantize_matrix(torch.full((1, 16), 2.0), amax=1.0, name="q_proj")


@pytest.mark.parametrize("policy", SCALE_POLICIES)
def test_all_zero_tensors_and_blocks_stay_zero(policy):
    weight = random_weight(rows=2, columns=32)
    weight[0, :16] = 0

    some, none = (
        quantize_matrix(weight, **options(policy, weight.shape[1])),
        quantize_matrix(torch.zeros(2, 32), **options(policy, 32)),
    )

    assert not some.dequantize()[0, :16].any()
    assert some.dequantize()[0, 16:].any()
    assert not none.dequantize().any()
    assert none.row_factor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("policy", SCALE_POLICIES)
def test_a_block_too_small_for_any_scale_becomes_zero_and_nothing_else_changes(policy):
    weight = torch.ones(1, 32)
    weight[0, 16:] = 1e-9

    values = quantize_matrix(weight, **options(policy, weight.shape[1])).dequantize()

    torch.testing.assert_close(values[:, :16], weight[:, :16], rtol=1e-6, atol=0)
    assert not values[:, 16:].any()


@pytest.mark.parametrize("policy", SCALE_POLICIES)
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 3e38])
def test_extreme_sizes_give_finite_values(policy, size):
    values = quantize_matrix(torch.full((2, 16), size), **options(policy, 16)).dequantize()

    assert values.isfinite().all()
    if size > 1e-30:
        torch.testing.assert_close(values, torch.full((2, 16), size), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_with_tensor_and_index(dtype, bad):
    weight = torch.zeros(4, 32, dtype=dtype)
    weight[2, 5] = bad

    with pytest.raises(QuantError, match=rf"up_proj\[2, 5\]: expected a finite weight, got {bad}"):
        quantize_matrix(weight, name="up_proj")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_quantized_like_the_same_numbers_in_float32(dtype):
    weight = random_weight().to(dtype)

    assert torch.equal(quantize_matrix(weight).dequantize(), quantize_matrix(weight.float()).dequantize())


@pytest.mark.parametrize("policy", SCALE_POLICIES)
def test_the_result_does_not_depend_on_the_chunk_size(policy, monkeypatch):
    weight = random_weight(rows=7)
    whole = quantize_matrix(weight, **options(policy, weight.shape[1]))
    monkeypatch.setattr(parallel, "CHUNK_ELEMENTS", 2 * 128)

    chunked = quantize_matrix(weight, **options(policy, weight.shape[1]))

    assert torch.equal(chunked.codes, whole.codes)
    assert torch.equal(chunked.dequantize(), whole.dequantize())


@pytest.mark.parametrize("shape", [(16,), (2, 24), (2, 2, 16)])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"weight: expected float \[N, multiple of 16\], got torch\.float32"):
        quantize_matrix(torch.zeros(shape))


def test_a_wrong_group_size_is_refused():
    with pytest.raises(ValueError, match="group_size: expected 16 or 32, got 8"):
        quantize_matrix(torch.zeros(2, 16), group_size=8)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16))
def test_the_error_of_a_weight_is_at_most_a_sixth_of_its_block_s_largest(values):
    weight = torch.tensor([values])

    quantized = quantize_matrix(weight, policy="maxabs")

    # Half of the widest step (4 to 6) is a sixth of 6. The scale's own error is at most 1/16 of the largest.
    bound = float(weight.abs().max()) * (1 / 6 + 1 / 16) + 1e-30
    assert float((quantized.dequantize() - weight).abs().max()) <= bound
