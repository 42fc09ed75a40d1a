from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from engine.requests import backends, scheduling
from engine.requests.client import isolate_outputs
from engine.requests.rows import NO_TOKEN
from engine.requests.scheduling import IMPOSSIBLE, GuardedGrammar, OneStepAtATime, OverlappingSteps

VOCABULARY = 70


class Grammar:
    """Allows everything; raises `fault` or refuses where it is asked to."""

    def __init__(self, at: str = "", fault: BaseException | None = None, *, accepts: bool = True) -> None:
        self._at, self._fault, self._accepts = at, fault, accepts
        self._is_terminated = False

    def _do(self, what: str) -> None:
        if what == self._at and self._fault is not None:
            raise self._fault

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        self._do("fill")
        bitmask[index] = -1

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._do("accept")
        return self._accepts

    def is_terminated(self) -> bool:
        self._do("is_terminated")
        return self._is_terminated


def guarded(inner: Any, width: int = 3) -> GuardedGrammar:
    made = GuardedGrammar("r")
    made.inner, made.width = inner, width
    return made


class PanicError(BaseException):
    """As llguidance's: no Exception."""


@pytest.mark.parametrize("fault", [RuntimeError("x"), PanicError("x")], ids=["exception", "panic"])
@pytest.mark.parametrize("at", ["fill", "accept", "is_terminated"])
def test_a_grammar_that_raises_allows_nothing_from_then_on(at: str, fault: BaseException) -> None:
    grammar = guarded(Grammar(at, fault))
    mask = torch.full((2, 3), 5, dtype=torch.int32)
    assert grammar.accept_tokens("r", [1])
    assert not grammar.is_terminated()
    grammar.fill_bitmask(mask, 1)
    assert grammar.failed
    assert mask.tolist() == [[5, 5, 5], [0, 0, 0]]


def test_ending_the_process_is_no_fault_of_a_grammar() -> None:
    with pytest.raises(SystemExit):
        guarded(Grammar("fill", SystemExit())).fill_bitmask(torch.zeros(1, 3, dtype=torch.int32), 0)


def test_a_refused_token_fails_a_grammar_that_is_not_over() -> None:
    going_on, over = guarded(Grammar(accepts=False)), guarded(Grammar(accepts=False))
    over.inner._is_terminated = True
    assert going_on.accept_tokens("r", [1])
    assert over.accept_tokens("r", [1])
    assert (going_on.failed, over.failed) == (True, False)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_masks_of_backends_that_know_other_vocabularies_fit(width: int) -> None:
    mask = torch.full((1, 3), 5, dtype=torch.int32)
    guarded(Grammar(), width).fill_bitmask(mask, 0)
    assert mask.tolist() == [[-1] * min(width, 3) + [0] * (3 - min(width, 3))]


def test_each_request_s_grammar_is_compiled_by_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compiles all by the first one's."""
    built: list[str] = []

    def make(name: str, *_: Any) -> Any:
        built.append(name)
        if name == "broken":
            raise RuntimeError("no such backend")

        def compile_grammar(kind: str, text: str, stop_token_ids: set[int]) -> Any:
            if text == "bad":
                raise ValueError("bad grammar")
            made = Grammar()
            made.name = name  # type: ignore[attr-defined]
            made.stops = stop_token_ids  # type: ignore[attr-defined]
            return made

        mask = torch.zeros(1, 3, dtype=torch.int32)
        return SimpleNamespace(compile_grammar=compile_grammar, allocate_token_bitmask=lambda _: mask)

    monkeypatch.setattr(backends, "make", make)
    manager: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=None,
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        ),
        tokenizer=None,
        executor=ThreadPoolExecutor(1),
        _use_async_grammar_compilation=True,
    )
    scheduling.guard(manager)
    assert manager._grammar_bitmask.shape == (4, 3)

    def compiled(backend: str, text: str = "good") -> Any:
        wanted = SimpleNamespace(params=SimpleNamespace(_backend=backend), structured_output_key=("kind", text))
        params = SimpleNamespace(all_stop_token_ids={7})
        request = SimpleNamespace(structured_output_request=wanted, request_id="r", sampling_params=params)
        manager.grammar_init(request)
        return wanted.grammar.result(10)

    assert [compiled(name).inner.name for name in ("one", "two", "one")] == ["one", "two", "one"]
    assert built == ["one", "two"]
    assert compiled("one").inner.stops == {7}
    assert compiled("one", "bad").failed
    assert compiled("broken").failed
    assert not compiled("two").failed


@pytest.mark.parametrize(("ours", "theirs"), [(OneStepAtATime, Scheduler), (OverlappingSteps, AsyncScheduler)])
def test_a_marked_row_fails_its_request_and_says_why(ours: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[int]] = []

    def update(self: Any, request: Any, tokens: list[int], is_stale: bool) -> tuple[list[int], bool]:
        passed.append(tokens)
        return tokens, False

    monkeypatch.setattr(theirs, "_update_request_with_output", update)
    scheduler = object.__new__(ours)
    request: Any = SimpleNamespace(request_id="r", status=RequestStatus.RUNNING, stop_reason=None)
    assert scheduler._update_request_with_output(request, [7]) == ([7], False)
    assert scheduler._update_request_with_output(request, [NO_TOKEN]) == ([], True)
    assert RequestStatus.get_finished_reason(request.status) == FinishReason.ERROR
    assert request.stop_reason == IMPOSSIBLE
    assert passed == [[7]]


@pytest.mark.parametrize(("overlapping", "chosen"), [(False, OneStepAtATime), (True, OverlappingSteps)])
def test_the_engine_schedules_with_these_unless_told_otherwise(overlapping: bool, chosen: type) -> None:
    from vllm.config import SchedulerConfig

    def config(**more: Any) -> Any:
        made = SchedulerConfig.default_factory(async_scheduling=overlapping, **more)
        scheduling.use(SimpleNamespace(scheduler_config=made))
        return made

    assert config().get_scheduler_cls() is chosen
    assert config(scheduler_cls="a.B").scheduler_cls == "a.B"


def test_output_that_cannot_be_made_fails_its_request_only() -> None:
    class Processor:
        def __init__(self) -> None:
            self.errors: dict[str, list[Exception]] = {"a": [], "b": [], "c": []}
            self.request_states = {
                name: SimpleNamespace(queue=SimpleNamespace(put=errors.append)) for name, errors in self.errors.items()
            }
            self.made: list[str] = []

        def process_outputs(self, outputs: list[Any], timestamp: float | None, stats: Any) -> Any:
            for output in outputs:
                if output.request_id == "b":
                    raise OverflowError("a token that no text has")
                self.made.append(output.request_id)
            return SimpleNamespace(request_outputs=[], reqs_to_abort=[f"stopped {outputs[0].request_id}"])

        def abort_requests(self, names: list[str], internal: bool) -> None:
            assert internal
            for name in names:
                del self.request_states[name]

    processor: Any = Processor()
    isolate_outputs(processor)
    processed = processor.process_outputs([SimpleNamespace(request_id=name) for name in "abc"], 1.0, None)
    assert processor.made == ["a", "c"]
    assert processed.reqs_to_abort == ["stopped a", "b", "stopped c"]
    assert [len(errors) for errors in processor.errors.values()] == [0, 1, 0]
    assert set(processor.request_states) == {"a", "c"}
