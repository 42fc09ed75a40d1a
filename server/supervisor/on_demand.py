"""The supervisor of an engine that runs only while it is wanted: stopped, started by `start`, stopped again by `retire`
and `rest`.

It never starts its engine by itself, not even after a failure. When to start and stop engines that share GPUs is
decided by server/gateway/swap.py.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import structlog

from server.config.render import progress_socket
from server.supervisor.output import EngineOutput
from server.supervisor.states import State
from server.supervisor.supervisor import MAX_BACKOFF, Supervisor, first_of

# A start may stop another model's engine, so it is retried later than that of an engine with GPUs of its own.
PATIENCE = 10.0

log = structlog.get_logger("voltserve.supervisor")


class OnDemandSupervisor(Supervisor):
    """Runs the engine from each `start` until `rest`, or until it fails. Arguments as of Supervisor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update(state=State.STOPPED, reason="no request has asked for it")
        self._wanted = asyncio.Event()
        self._retiring = asyncio.Event()
        self._resting = asyncio.Event()
        self._leaving += (self._retiring,)
        self._ending += (self._resting,)

    @property
    def occupied(self) -> bool:
        """Whether the engine has a process, or is to get one. Otherwise nothing of it uses its GPUs."""
        return self._wanted.is_set()

    def start(self) -> None:
        """Starts the engine. It must not be `occupied`."""
        again = {"restarts": self.status.restarts + 1} if self.status.state is State.FAILED else {}
        self._enter(State.STARTING, "a request asked for it", retry_at=None, **again)
        self._wanted.set()

    def retire(self, reason: str) -> None:
        """No new requests from now on; the engine goes on until `rest`. One that has failed or is stopped stays so."""
        if self.status.state not in {State.STOPPED, State.FAILED, State.DRAINING}:
            self._enter(State.DRAINING, reason, progress=None)
            self._retiring.set()

    def rest(self) -> None:
        """Stops a retired engine, within the stop timeout."""
        self._resting.set()

    def drain(self, reason: str) -> None:
        """As Supervisor's; the engine may be draining already, to make room for another."""
        if self.status.state is State.DRAINING:
            self._update(reason=reason)
            self._draining.set()
        else:
            super().drain(reason)

    async def _is_wanted(self) -> bool:
        await first_of(self._wanted, self._draining)
        return not self._draining.is_set()

    async def _after_end(self) -> None:
        _remove_sockets(self._runtime)
        for event in (self._wanted, self._retiring, self._resting):
            event.clear()
        if self._draining.is_set():
            return
        if self.status.state is State.DRAINING:
            self._enter(State.STOPPED, self.status.reason)
            return
        if self._was_ready:  # the next request may start it at once
            self._update(retry_at=None)
            return
        delay = self._patience()
        log.warning("not started again before", seconds=delay, failures=self._failures)
        self._update(retry_at=time.monotonic() + delay)

    def _patience(self) -> float:
        """Seconds after a failed start in which there is no other."""
        longest = PATIENCE * MAX_BACKOFF
        return longest if self._lasting else min(longest, PATIENCE * self._backoff(self._failures))

    def _finish(self, exit_text: str, output: EngineOutput) -> None:
        if not self._retiring.is_set():
            super()._finish(exit_text, output)
        elif not self._resting.is_set() and not self._stopping.is_set():
            log.warning("ended before its requests did", how=exit_text)


def _remove_sockets(runtime: Path) -> None:
    """Removes an engine's sockets. vLLM leaves its own behind, some at each start."""
    for path in runtime.iterdir():
        if path.is_socket() and path != progress_socket(runtime):
            path.unlink(missing_ok=True)
