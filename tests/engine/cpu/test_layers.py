"""Layers that voltserve_kernels compute on the CPU, against vLLM's own."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from engine.cpu import layers as cpu_layers
from engine.cpu.layers import CpuRMSNorm, CpuSiluAndMul
from tests.engine.conftest import AsRank


@pytest.fixture(autouse=True)
def registered(as_rank: AsRank) -> None:
    as_rank(0, 1)
    cpu_layers.register()


def test_vllm_makes_our_layers_in_place_of_its_own() -> None:
    assert type(RMSNorm(64)) is CpuRMSNorm
    assert type(SiluAndMul()) is CpuSiluAndMul


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_a_norm_gives_what_vllm_gives_for_every_dtype_and_layout(dtype: torch.dtype, strided: bool) -> None:
    norm = RMSNorm(48, eps=1e-5, dtype=dtype)
    norm.weight.data = torch.rand(48).to(dtype) + 0.5
    x, residual = (torch.randn(3, 96).to(dtype)[:, :48] if strided else torch.randn(3, 48).to(dtype) for _ in range(2))
    torch.testing.assert_close(norm(x), norm.forward_native(x))
    expected = norm.forward_native(x.clone(), residual.clone())
    for got, wanted in zip(norm(x, residual), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_norm_over_a_part_of_its_input_stays_with_vllm() -> None:
    norm = RMSNorm(48, var_hidden_size=16)
    x = torch.randn(2, 3, 48)
    torch.testing.assert_close(norm(x), norm.forward_native(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_and_mul_gives_what_vllm_gives(dtype: torch.dtype) -> None:
    x = torch.randn(3, 96).to(dtype)
    torch.testing.assert_close(SiluAndMul()(x), SiluAndMul.forward_native(x))
