from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig

from engine.steps import graph_check
from engine.steps.graph_check import GraphSwitch, Step, compare

A, B, C = 11, 22, 33


def steps(*tokens: int, shift: float = 0.0) -> list[Step]:
    """Each step gives its token −0.5, all others named here −3."""
    return [Step(token, {other: -0.5 + shift if other == token else -3.0 for other in (A, B, C)}) for token in tokens]


def test_the_same_steps_agree() -> None:
    assert compare(steps(A, B, C), steps(A, B, C)) == (3, "")


@pytest.mark.parametrize("shift", [0.2, -0.2])
def test_rounding_is_no_difference(shift: float) -> None:
    assert compare(steps(A, B), steps(A, B, shift=shift)) == (2, "")


@pytest.mark.parametrize("shift", [0.4, -0.4, math.nan])
def test_the_same_token_at_another_probability_is_a_difference(shift: float) -> None:
    same, problem = compare(steps(A, B), [*steps(A), *steps(B, shift=shift)])
    assert same == 1
    assert "token 1: expected log probability -0.500 of 22" in problem


def test_a_near_tie_that_turns_ends_the_comparison_without_a_difference() -> None:
    eager = [Step(A, {A: -0.6, B: -0.7}), *steps(A)]
    graphs = [Step(B, {A: -0.7, B: -0.6}), *steps(C)]
    assert compare(eager, graphs) == (0, "")


def test_another_token_that_eager_steps_find_unlikely_is_a_difference() -> None:
    graphs = [Step(B, {A: -0.6, B: -0.5})]
    assert "eager steps find unlikely" in compare(steps(A), graphs)[1]


def test_a_token_that_is_not_even_among_the_likeliest_is_a_difference() -> None:
    assert "not among the likeliest" in compare(steps(A), [Step(B, {B: -0.5, C: -2.0})])[1]


class FakeEngine:
    """Generates A, B, C, A … and, while its graphs are on in a batch of `broken` sequences, something less sure."""

    def __init__(self, sizes: list[int], broken: int = 0, text: bool = True, recorded: bool = False) -> None:
        self.sizes, self.broken, self.recorded = sizes, broken, recorded
        self.graphs = True
        self.running = 0
        self.batches: list[tuple[bool, int]] = []
        self.prompts: list[Any] = []
        self.model_config = SimpleNamespace(skip_tokenizer_init=not text)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "voltserve_captured_sizes":
            return [self.sizes, self.sizes]  # two ranks
        if method == "voltserve_is_recorded":
            return [self.recorded, self.recorded]
        assert method == "voltserve_replay"
        (self.graphs,) = args
        return [None, None]

    async def reset_prefix_cache(self) -> bool:
        return True

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        assert params.temperature == 0
        self.prompts.append(prompt)
        self.running += 1
        await asyncio.sleep(0)  # all requests of the batch are in
        batch = self.running
        if request_id == "graph-check-0":
            self.batches.append((self.graphs, batch))
        wrong = self.graphs and batch == self.broken
        tokens = [(A, B, C)[index % 3] for index in range(params.max_tokens)]
        logprobs = [
            {token: SimpleNamespace(logprob=-2.5 if wrong and index == 5 else -0.5)}
            for index, token in enumerate(tokens)
        ]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])
        self.running -= 1


async def test_every_captured_size_is_compared_with_eager_steps() -> None:
    engine = FakeEngine([1, 2, 4, 20])
    chosen = await graph_check.check(engine)
    assert engine.batches == [(False, 20), (True, 1), (True, 2), (True, 4), (True, 20)]
    assert engine.graphs
    assert chosen.choice.startswith("agree")
    assert str(27 * graph_check.TOKENS) in chosen.reason


@pytest.mark.parametrize("broken", [1, 4, 20])
async def test_a_graph_that_computes_something_else_is_not_used(broken: int) -> None:
    engine = FakeEngine([1, 4, 20], broken)
    chosen = await graph_check.check(engine)
    assert not engine.graphs
    assert chosen.problem is None
    assert chosen.choice == "differ: eager steps instead"
    assert f"batch of {broken}, sequence 0, token 5" in chosen.reason


async def test_recorded_steps_without_graphs_are_compared_with_the_modules() -> None:
    engine = FakeEngine([], recorded=True)
    chosen = await graph_check.check(engine)
    every = len(graph_check.PROMPTS)
    assert engine.batches == [(False, every), (True, every)]
    assert engine.graphs
    assert (chosen.what, chosen.choice) == (graph_check.WHAT_RECORDED, "agree: recorded steps are used")


async def test_recorded_steps_that_compute_something_else_are_not_used() -> None:
    engine = FakeEngine([], broken=len(graph_check.PROMPTS), recorded=True)
    chosen = await graph_check.check(engine)
    assert not engine.graphs
    assert chosen.choice == "differ: eager steps instead"


async def test_without_captured_graphs_or_recorded_steps_there_is_nothing_to_compare() -> None:
    engine = FakeEngine([])
    assert (await graph_check.check(engine)).choice == "eager steps"
    assert engine.batches == []


async def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    engine = FakeEngine([1], text=False)
    await graph_check.check(engine)
    assert all(prompt["prompt_token_ids"] for prompt in engine.prompts)


class Recorded(nn.Module):
    """What vLLM's wrapper of a model is to the switch."""

    def __init__(self) -> None:
        super().__init__()
        self.do_not_compile = False
        self._compiled_callable = object()


def test_the_switch_turns_vllms_dispatcher_and_recorded_modules() -> None:
    """vLLM's own dispatcher, with batches of 2 and 4 captured: what it would replay, and what it would run."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    config = VllmConfig()
    config.scheduler_config.max_num_seqs = 4
    config.compilation_config.mode = CompilationMode.NONE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.compilation_config.cudagraph_capture_sizes = [2, 4]
    config.compilation_config.max_cudagraph_capture_size = 4
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
    worker = GraphSwitch()
    model = Recorded()
    worker.model_runner = SimpleNamespace(
        cudagraph_dispatcher=dispatcher, compilation_config=config.compilation_config, get_model=lambda: model
    )
    assert worker.voltserve_is_recorded()
    assert worker.voltserve_captured_sizes() == [2, 4]
    for wanted, mode in ((False, CUDAGraphMode.NONE), (True, CUDAGraphMode.FULL)):
        worker.voltserve_replay(wanted)
        assert dispatcher.dispatch(3, uniform_decode=True)[0] == mode
        assert model.do_not_compile != wanted
