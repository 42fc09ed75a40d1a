"""Layers that voltserve_kernels compute on the CPU, against vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from engine.cpu import layers as cpu_layers
from engine.cpu.layers import CpuRMSNorm, CpuSiluAndMul, StoredDtypeEmbedding
from tests.engine.conftest import AsRank
from tests.engine.made_layers import config


@pytest.fixture(autouse=True)
def registered(as_rank: AsRank, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(0, 1)
    for name, result in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(vocab_parallel_embedding, f"get_tensor_model_parallel_{name}", lambda result=result: result)
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


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_embeddings_keep_the_dtype_of_the_checkpoint(stored: torch.dtype) -> None:
    weight = torch.randn(100, 32).to(stored)
    layers: list[Any] = [kind(100, 32, quant_config=config()) for kind in (VocabParallelEmbedding, ParallelLMHead)]
    for layer in layers:
        layer.weight.weight_loader(layer.weight, weight)
        layer.quant_method.process_weights_after_loading(layer)
        assert isinstance(layer.quant_method, StoredDtypeEmbedding)
        assert layer.weight.dtype == stored
    embedding, head = layers
    ids = torch.tensor([0, 99, 7])
    assert torch.equal(embedding.quant_method.embedding(embedding, ids), weight[ids].float())
    x = torch.randn(3, 32)
    bias = torch.randn(head.weight.shape[0])
    logits = head.quant_method.apply(head, x, bias)[:, :100]
    torch.testing.assert_close(logits, x @ weight.float().T + bias[:100], rtol=1e-5, atol=1e-5)


def test_an_engine_in_16_bits_keeps_vllms_embeddings() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        layer = VocabParallelEmbedding(100, 32, quant_config=config())
    finally:
        torch.set_default_dtype(torch.float32)
    assert not isinstance(layer.quant_method, StoredDtypeEmbedding)


def test_a_width_that_the_kernel_does_not_take_stays_with_vllm() -> None:
    assert not isinstance(VocabParallelEmbedding(100, 24, quant_config=config()).quant_method, StoredDtypeEmbedding)
