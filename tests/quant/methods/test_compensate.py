import numpy as np
import pytest
import torch

from quant.blockwise import quantize_matrix
from quant.formats.quantize_config import SCALE_POLICIES
from quant.methods.compensate import compensation_factor


def weight_and_hessian(rows: int = 48, columns: int = 96, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that move together, as a layer's do, and differ in size by column."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * (torch.rand(columns, generator=generator) + 0.05)
    inputs = torch.randn(400, columns, generator=generator) @ mixing
    return torch.randn(rows, columns, generator=generator) * 0.1, inputs.t() @ inputs


def output_error(weight: torch.Tensor, hessian: torch.Tensor, values: torch.Tensor) -> float:
    difference = values.double() - weight.double()
    return float(((difference @ hessian.double()) * difference).sum())


def test_the_factor_inverts_the_damped_hessian():
    _, hessian = weight_and_hessian()

    factor = compensation_factor(hessian, damping=0.05).double().numpy()

    scaled = hessian.double().numpy() / hessian.diagonal().double().mean().item() + 0.05 * np.eye(96)
    np.testing.assert_array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ scaled, np.eye(96), atol=1e-4)


@pytest.mark.parametrize("policy", SCALE_POLICIES)
@pytest.mark.parametrize("group_size", [16, 32])
def test_compensation_nearly_halves_the_output_error_of_every_policy(policy, group_size):
    weight, hessian = weight_and_hessian()
    saliency = hessian.diagonal().contiguous()

    plain = quantize_matrix(weight, policy=policy, group_size=group_size, saliency=saliency)
    compensated = quantize_matrix(weight, policy=policy, group_size=group_size, hessian=hessian)

    before, after = (output_error(weight, hessian, values.dequantize()) for values in (plain, compensated))
    assert after < 0.55 * before


@pytest.mark.parametrize("policy", ["maxabs", "mse"])
def test_inputs_that_do_not_move_together_leave_nothing_to_compensate(policy):
    weight, _ = weight_and_hessian()

    compensated = quantize_matrix(weight, policy=policy, hessian=torch.diag(torch.rand(96) + 0.1))

    assert torch.equal(compensated.dequantize(), quantize_matrix(weight, policy=policy).dequantize())


@pytest.mark.parametrize("policy", SCALE_POLICIES)
def test_a_layer_that_calibration_never_reached_is_rounded_as_without(policy):
    weight, _ = weight_and_hessian()

    compensated = quantize_matrix(weight, policy=policy, hessian=torch.zeros(96, 96))

    plain = quantize_matrix(weight, policy=policy, saliency=torch.ones(96))
    assert torch.equal(compensated.dequantize(), plain.dequantize())


def test_a_column_never_in_use_does_not_spoil_the_others():
    weight, hessian = weight_and_hessian()
    hessian[5] = 0
    hessian[:, 5] = 0

    values = quantize_matrix(weight, policy="quasar", hessian=hessian).dequantize()

    assert values.isfinite().all()
    plain = quantize_matrix(weight, policy="mse").dequantize()
    assert output_error(weight, hessian, values) < 0.5 * output_error(weight, hessian, plain)


def test_a_matrix_that_is_no_hessian_is_refused():
    weight, hessian = weight_and_hessian()

    with pytest.raises(ValueError, match="hessian: expected a positive semidefinite matrix"):
        quantize_matrix(weight, hessian=-hessian + 2 * torch.diag(hessian.diagonal()))
    with pytest.raises(ValueError, match=r"hessian: expected finite \[K, K\]"):
        quantize_matrix(weight, hessian=torch.full((96, 96), torch.nan))
    with pytest.raises(ValueError, match=r"hessian: expected float32 \[96, 96\], got torch.float32 \[64, 64\]"):
        quantize_matrix(weight, hessian=torch.eye(64))


def test_zero_weights_stay_zero_and_tiny_blocks_do_not_become_nan():
    _, hessian = weight_and_hessian()
    weight = torch.zeros(4, 96)
    weight[0, 0] = 1.0
    weight[1, 16:32] = 1e-9

    values = quantize_matrix(weight, policy="quasar", hessian=hessian).dequantize()

    assert values.isfinite().all()
    assert not values[2:].any()
    assert not quantize_matrix(torch.zeros(4, 96), hessian=hessian).dequantize().any()
