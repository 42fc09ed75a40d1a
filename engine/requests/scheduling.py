"""vLLM's schedulers, which fail only the request that cannot continue.

A request fails if its row of logits has no possible token (rows.py). A failed grammar allows no token, so its request
fails in the same way. All other requests of the step continue. The client gets the error as vLLM's.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from engine.requests import backends
from engine.requests.rows import NO_TOKEN

log = init_logger(__name__)
T = TypeVar("T")
IMPOSSIBLE = "no possible token"  # a failed request's reason to stop


def use(config: VllmConfig) -> None:
    """Makes the engine schedule with these classes, unless `--scheduler-cls` names another."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        chosen = OverlappingSteps if scheduler.async_scheduling else OneStepAtATime
        scheduler.scheduler_cls = f"{__name__}.{chosen.__name__}"


class _Isolating:
    """Mixed into vLLM's schedulers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        guard(self.structured_output_manager)  # type: ignore[attr-defined]  # vLLM's

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        if NO_TOKEN in new_token_ids:
            log.warning("request %s: no token is possible (NaN, or all masked); it fails", request.request_id)
            request.status = RequestStatus.FINISHED_ERROR
            request.stop_reason = IMPOSSIBLE
            return [], True
        updated: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, is_stale)  # type: ignore[misc]
        return updated


class OneStepAtATime(_Isolating, Scheduler):  # type: ignore[misc]
    """A step is scheduled after the tokens of the step before are known."""


class OverlappingSteps(_Isolating, AsyncScheduler):  # type: ignore[misc]
    """A step is scheduled while the step before runs."""


def guard(manager: StructuredOutputManager) -> None:
    """Makes `manager` survive any grammar, and compile each with the backend that its request was checked with.

    vLLM uses the first request's backend for all, so one schema would decide how all others are parsed.
    """
    config = manager.vllm_config
    made: dict[str, StructuredOutputBackend] = {}
    lock = threading.Lock()

    def grammar_init(request: Request) -> None:
        if request.structured_output_request is None:
            return
        if manager._use_async_grammar_compilation:
            request.structured_output_request.grammar = manager.executor.submit(create, request)
        else:
            request.structured_output_request.grammar = create(request)

    def create(request: Request) -> "GuardedGrammar":
        guarded = GuardedGrammar(request.request_id)

        def compile_it() -> None:
            wanted = request.structured_output_request
            with lock:
                name = wanted.params._backend
                if name not in made:
                    made[name] = backends.make(name, config, manager.tokenizer)
                backend = made[name]
            stops = request.sampling_params.all_stop_token_ids
            guarded.inner = backend.compile_grammar(*wanted.structured_output_key, stop_token_ids=stops)
            backends.check(guarded.inner)
            guarded.width = backend.allocate_token_bitmask(1).shape[1]

        guarded.attempt(compile_it, None)
        return guarded

    positions = 1 + (config.speculative_config.num_speculative_tokens if config.speculative_config else 0)
    words = -(-config.model_config.get_vocab_size() // 32)
    manager._grammar_bitmask = torch.full(
        (config.scheduler_config.max_num_seqs * positions, words), -1, dtype=torch.int32
    )
    manager.grammar_init = grammar_init
    manager.backend = _Several(made)  # vLLM needs it only for the mask, which exists, and to end it


class _Several:
    """All backends in use, which vLLM destroys at the end."""

    def __init__(self, made: dict[str, StructuredOutputBackend]) -> None:
        self._made = made

    def destroy(self) -> None:
        for backend in self._made.values():
            backend.destroy()


class GuardedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar that fails alone: once one of its methods has raised, it allows no token."""

    def __init__(self, request_id: str) -> None:
        self.inner: Any = None  # the backend's, once compiled
        self.width = 0  # of its masks, in words; a backend may have more tokens than the model
        self.failed = False
        self._request = request_id

    def attempt(self, what: Callable[[], T], instead: T) -> T:
        """The result of `what`; `instead` if it raises, or if the grammar has failed before."""
        if self.failed:
            return instead
        try:
            return what()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panics are not Exceptions
            self._fail(f"{type(error).__name__}: {error}")
            return instead

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """Writes the allowed next tokens into a row of `bitmask`; none if the grammar has failed."""

        def fill() -> None:
            if self.width == bitmask.shape[1]:
                self.inner.fill_bitmask(bitmask, index)
                return
            row = torch.full((1, self.width), -1, dtype=torch.int32)
            self.inner.fill_bitmask(row, 0)
            shared = min(self.width, bitmask.shape[1])
            bitmask[index] = 0
            bitmask[index, :shared] = row[0, :shared]

        self.attempt(fill, None)
        if self.failed:
            bitmask[index] = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advances by `tokens`. If an unfinished grammar refuses them, it fails, since its state is no longer valid."""

        def accept() -> bool:
            return self.inner.accept_tokens(request_id, tokens) or backends.over(self.inner)

        if not self.attempt(accept, True):
            self._fail(f"refused tokens {tokens}")
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest beginning of `tokens` that the grammar accepts. It does not advance."""
        return self.attempt(lambda: self.inner.validate_tokens(tokens), [])

    def rollback(self, num_tokens: int) -> None:
        """Goes back by `num_tokens` tokens."""
        self.attempt(lambda: self.inner.rollback(num_tokens), None)

    def is_terminated(self) -> bool:
        """Whether the grammar is at its end, so that any token may follow."""
        return self.attempt(lambda: bool(self.inner.is_terminated()), False)

    def reset(self) -> None:
        """Returns to the beginning."""
        if not self.failed:
            self.attempt(self.inner.reset, None)

    def _fail(self, why: str) -> None:
        self.failed = True
        log.warning("request %s: its grammar failed (%s)", self._request, why[:300])
