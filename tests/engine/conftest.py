"""Tensor-parallel layers of vLLM in this one process: rank and size are faked, weights are sharded for real."""

from collections.abc import Callable, Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear

AsRank = Callable[[int, int], None]


@pytest.fixture
def vllm_config() -> Iterator[VllmConfig]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def as_rank(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> AsRank:
    """as_rank(rank, size): layers made from now on believe to be that tensor-parallel rank."""

    def fake(rank: int, size: int) -> None:
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    torch.set_default_dtype(torch.float32)
    return fake
