"""Recording on the operators that vLLM really has; a model's recorded steps on the real engine: test_real_engine.py."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.runner.moe_runner  # noqa: F401 - registers an operator
from torch import fx, nn
from vllm.distributed.parallel_state import all_reduce
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention import attention as vllm_attention

from engine import ops, progress
from engine.steps import fusion, recording
from lookalikes.random_models import LAYERS, QWEN3, QWEN3_MOE, Architecture, write_model

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("hybrid", "gpu", "disabled", "choice", "reason"),
    [
        (False, False, False, "recorded", "is faster"),
        (False, True, False, "recorded", "are fused"),
        (True, True, False, "eager", "recurrent"),
        (False, True, True, "eager", "TORCH_COMPILE_DISABLE"),
    ],
)
def test_steps_are_recorded_unless_something_speaks_against_it(
    hybrid: bool, gpu: bool, disabled: bool, choice: str, reason: str
) -> None:
    chosen = recording.choose(hybrid=hybrid, gpu=gpu, disabled=disabled)
    assert chosen.choice == choice
    assert reason in chosen.reason


def test_choosing_needs_the_standard_library_alone() -> None:
    subprocess.run([sys.executable, "-S", "-c", "import engine.steps.recording"], check=True, cwd=ROOT)


@pytest.mark.parametrize(("devices", "fused"), [(["cpu", "cuda"], True), (["cpu"], False), ([], False)])
def test_operations_are_fused_only_where_kernels_for_gpus_are_installed(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], fused: bool
) -> None:
    asked: list[fx.Graph] = []
    settled: list[Any] = []
    monkeypatch.setattr(ops, "kernel_devices", lambda: devices)

    def fuse(graph: fx.Graph) -> Any:
        asked.append(graph)
        return fusion.WITHOUT_KERNELS

    monkeypatch.setattr(fusion, "fuse", fuse)
    monkeypatch.setattr(progress, "settle", settled.append)
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    step = recording.replay_fused(fx.GraphModule({}, graph), [])
    assert step(torch.ones(1)) == 1
    assert bool(asked) == fused
    assert len(settled) == 1


def traced(*operators: Any) -> fx.Graph:
    """A graph of one layer's attention, or of the given operators, as Dynamo writes it."""
    graph = fx.Graph()
    query, key, value, output = (graph.placeholder(name) for name in ("query", "key", "value", "output"))
    for operator in operators:
        query = graph.call_function(operator, (query, "group"))
    done = graph.call_function(torch.ops.vllm.unified_kv_cache_update, (key, value, "layers.0"))
    attention = torch.ops.vllm.unified_attention_with_output
    graph.call_function(attention, (query, key, value, output, "layers.0"), {"kv_cache_dummy_dep": done})
    graph.output((output,))
    return graph


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("operator", [torch.ops.vllm.all_reduce, torch.ops.vllm.all_reduce.default])
def test_operators_of_python_become_the_functions_in_them(operator: Any) -> None:
    graph = traced(operator)
    recording.direct(graph)
    fx.GraphModule({}, graph).graph.lint()
    assert targets(graph) == [all_reduce, ops.update_and_attend]


def test_attention_that_writes_its_cache_itself_stays_one_call() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("query", "key", "value", "output")]
    graph.call_function(torch.ops.vllm.unified_attention_with_output, (*inputs, "layers.0"))
    graph.output((inputs[3],))
    recording.direct(graph)
    assert targets(graph) == [vllm_attention.unified_attention_with_output]


def test_the_cache_is_written_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Impl:
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            calls.append(("update", key, value, cache, slots))

        def forward(self, layer: Any, *inputs: Any, output: Any) -> None:
            calls.append(("attend", *inputs))
            output.fill_(1)

    context = ("metadata", SimpleNamespace(impl=Impl()), "cache", "slots")
    monkeypatch.setattr(vllm_attention, "get_attention_context", {"layers.0": context}.__getitem__)
    step = recording.replay(fx.GraphModule({}, traced()), ())
    output = torch.zeros(2)
    (returned,) = step("q", "k", "v", output)
    assert calls == [("update", "k", "v", "cache", "slots"), ("attend", "q", "k", "v", "cache", "metadata")]
    assert returned is output and output.tolist() == [1, 1]


class Stack(nn.Module):
    """What vLLM's wrapper of a model is to recording."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.do_not_compile = False
        attention = Attention.__new__(Attention)
        nn.Module.__init__(attention)
        attention.use_direct_call = False
        self.attention = attention
        self.body = forward
        self._compiled_callable = torch.compile(self.forward, fullgraph=True, backend=recording.replay)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def unrecordable(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + float(x.sum())


def test_a_model_that_cannot_be_recorded_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(progress, "decision", lambda what, choice, _reason: told.append((what, choice)))
    model = Stack(unrecordable)
    recording.allow_eager(model)
    assert model._compiled_callable(torch.ones(2)).tolist() == [3, 3]
    assert told == [(recording.WHAT, "eager")]
    assert model.do_not_compile
    assert model.attention.use_direct_call
    recording.use_recorded(model, wanted=True)  # which nothing is
    assert model.do_not_compile
    assert model.attention.use_direct_call


def test_a_model_that_can_be_recorded_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "decision", lambda *_told: pytest.fail("nothing to tell"))
    model = Stack(lambda x: x + 1)
    recording.allow_eager(model)
    assert model._compiled_callable(torch.ones(2)).tolist() == [2, 2]
    assert not model.do_not_compile


@pytest.mark.parametrize("wanted", [False, True])
def test_a_recorded_model_can_run_its_modules_instead(wanted: bool) -> None:
    model = Stack(lambda x: x + 1)
    recording.use_recorded(model, wanted)
    assert model.do_not_compile != wanted
    assert model.attention.use_direct_call != wanted


def test_an_error_of_the_model_s_own_is_not_swallowed() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)

    model = Stack(wrong)
    recording.allow_eager(model)
    with pytest.raises((RuntimeError, ValueError)):
        model._compiled_callable(torch.ones(2))


@pytest.mark.parametrize("architecture", [QWEN3, QWEN3_MOE], ids=lambda one: one.model_type)
def test_a_v100_s_step_is_recorded_and_fused_with_nothing_between_its_operations(
    tmp_path: Path, architecture: Architecture
) -> None:
    write_model(tmp_path / "model", tmp_path / "twin", architecture, "compressed-tensors", head_dim=64)
    command = [sys.executable, "-m", "tests.engine.volta_recorded", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    called = Counter(done.stdout.splitlines())
    experts = architecture is QWEN3_MOE
    assert called["rotate_and_attend"] == LAYERS
    assert not called["update_and_attend"]
    assert called["nvfp4_linear.default"] == (2 if experts else 4) * LAYERS
    assert called["_moe_forward"] == (LAYERS if experts else 0)
    assert not [name for name in called if "unified" in name or ("moe_forward" in name and name != "_moe_forward")]
    assert not called["_get_data_attr"]
