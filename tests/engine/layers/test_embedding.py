"""Embeddings and lm_head on CPUs in the checkpoint's dtype, against vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from engine.layers.embedding import StoredDtypeEmbedding
from tests.engine.conftest import AsRank
from tests.engine.made_layers import config


@pytest.fixture(autouse=True)
def one_rank(as_rank: AsRank, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(0, 1)
    for name, result in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(vocab_parallel_embedding, f"get_tensor_model_parallel_{name}", lambda result=result: result)


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
