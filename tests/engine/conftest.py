"""Tensor-parallel layers of vLLM in this one process: rank and size are faked, weights are sharded for real."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.model_loader import get_model_loader

from engine import environment, plugin, progress
from engine.weights import loader

AsRank = Callable[[int, int], None]
LoadWeights = Callable[..., None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a platform says that it chose, where the environment asks for nothing."""
    choices: dict[str, str] = {}
    monkeypatch.setattr(progress, "decision", lambda what, choice, _reason: choices.update({what: choice}))
    monkeypatch.delenv(environment.NO_DYNAMO, raising=False)
    monkeypatch.delenv("VLLM_USE_AOT_COMPILE", raising=False)
    return choices


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


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> LoadWeights:
    """load(directory, model): the load format's own loader, without an engine."""
    plugin.register()
    monkeypatch.setattr(loader.ReportingLoader, "_init_ep_weight_filter", lambda *_: None)

    def run(directory: Path, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        config = SimpleNamespace(model=str(directory), revision=None, quantization=None, dtype=dtype)
        model_loader = get_model_loader(LoadConfig(load_format=loader.LOAD_FORMAT))
        model_loader.load_weights(model, config)

    return run
