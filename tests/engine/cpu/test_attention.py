from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Linear, ModuleList
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from engine.cpu import attention as cpu_attention
from engine.cpu.attention import Builder, openmp_threads, spare_openmp
from lookalikes.linears import member
from tests.engine.conftest import AsRank
from tests.engine.made_layers import load, make


@pytest.fixture(autouse=True)
def process_as_before(as_rank: AsRank, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    as_rank(0, 1)
    monkeypatch.setattr(cpu_attention, "_threads", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def layer() -> Any:
    made = make("ColumnParallelLinear", 32, 8)
    load(made, member(8, 32, 5.0))
    made.quant_method.process_weights_after_loading(made)
    return made


def threads_after_a_step(monkeypatch: pytest.MonkeyPatch, tokens: int, lengths: list[int]) -> int:
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", lambda *_arguments: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _threads: None)  # as vLLM's CPU worker does
    step = SimpleNamespace(num_actual_tokens=tokens, seq_lens=torch.tensor(lengths))
    Builder.build(Builder.__new__(Builder), 0, step)
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("tokens", "positions", "threads"), [(1, 100, 1), (16, 4096, 1), (17, 100, 2), (1, 4097, 2), (2048, 2048, 2)]
)
def test_small_steps_take_one_thread(tokens: int, positions: int, threads: int) -> None:
    assert openmp_threads(tokens, positions, 2) == threads


def test_steps_choose_their_threads_once_a_model_on_kernels_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_after_a_step(monkeypatch, 1, [5]) == 2
    spare_openmp(ModuleList([layer(), layer()]))
    assert threads_after_a_step(monkeypatch, 1, [5]) == 1
    assert threads_after_a_step(monkeypatch, 100, [100]) == 2
    assert threads_after_a_step(monkeypatch, 2, [10, 3000]) == 1
    assert threads_after_a_step(monkeypatch, 2, [2000, 3000]) == 2


def test_a_model_with_a_layer_that_needs_openmp_keeps_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = layer()
    dense.quant_method = UnquantizedLinearMethod()
    spare_openmp(ModuleList([layer(), dense]))
    assert threads_after_a_step(monkeypatch, 1, [5]) == 2
    spare_openmp(Linear(4, 4))
    assert threads_after_a_step(monkeypatch, 1, [5]) == 2


def test_vllm_is_given_our_backend_for_cpus() -> None:
    cpu_attention.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is cpu_attention.Backend
    assert cpu_attention.Backend.get_builder_cls() is Builder
    assert cpu_attention.Backend.get_name() == "CPU_ATTN"
