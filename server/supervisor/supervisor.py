"""The supervisor: one engine at a time, from start to ready, from failure to restart, until `stop`."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import structlog

from server.config.render import Launch, engine_socket, progress_socket
from server.config.settings import Config
from server.decisions import Decision, costly
from server.diagnosis import Ending, Fault, diagnose
from server.supervisor.output import EngineOutput
from server.supervisor.probe import EngineNotWorkingError, Heartbeat, Pulse, heartbeat, prove, wait_until_it_answers
from server.supervisor.process import EngineProcess, describe_exit
from server.supervisor.progress import Event, FaultEvent, ProgressTracker, PulseEvent, receive_progress
from server.supervisor.states import Progress, State, Status, check_transition

MAX_FAILURES = 5  # in a row, without having been ready between them
MAX_BACKOFF = 60.0  # seconds
MAX_FAULTS = 50  # of one start's, kept
SHOWN_WORDS = 3
HEARTBEAT_INTERVAL = 1.0  # seconds

log = structlog.get_logger("voltserve.supervisor")
engine_log = structlog.get_logger("voltserve.engine")


def backoff(failures: int) -> float:
    """Seconds until the next start after `failures` failures in a row: 1, 2, 4 … 60."""
    return float(min(MAX_BACKOFF, 2.0 ** (failures - 1)))


class EngineFaultError(Exception):
    """The engine has to be stopped, for the reason given."""


class Supervisor:
    """Runs the engine. `status` is a snapshot for everyone; only this class writes it.

    Args:
        config: the merged configuration.
        launch: how the engine is started.
        runtime: the private folder of the engine's sockets.
        client: asks the engine over its socket.
        decisions: what was decided before the engine was started.
        backoff: seconds until the next start, from the number of failures in a row.
    """

    def __init__(
        self,
        config: Config,
        launch: Launch,
        runtime: Path,
        client: httpx.AsyncClient,
        decisions: tuple[Decision, ...] = (),
        backoff: Callable[[int], float] = backoff,
    ) -> None:
        now = time.monotonic()
        self.status = Status(State.STARTING, "not started yet", since=now, started_at=now, decisions=decisions)
        self._config = config
        self._launch = launch
        self._runtime = runtime
        self._client = client
        self._decisions = decisions
        self._backoff = backoff
        self._listeners: list[Callable[[Status], None]] = []
        self._failures = 0
        self._tracker = ProgressTracker()
        self._pulsed_at: float | None = None
        self._faults: list[Fault] = []
        self._was_ready = False  # this engine has been ready
        self._process: EngineProcess | None = None
        self._draining = asyncio.Event()
        self._stopping = asyncio.Event()
        # One of the first ends requests to the engine, one of the second ends it.
        self._leaving: tuple[asyncio.Event, ...] = (self._draining,)
        self._ending: tuple[asyncio.Event, ...] = (self._stopping,)

    def subscribe(self, listener: Callable[[Status], None]) -> None:
        """Calls `listener` with each new status, in the event loop."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Starts the engine and keeps it running until `drain` and `stop` are called. No process of it is left then."""
        transport = await receive_progress(progress_socket(self._runtime), self._on_event, self._on_invalid)
        try:
            while await self._is_wanted():
                await self._run_engine()
                await self._after_end()
        finally:
            transport.close()

    def drain(self, reason: str) -> None:
        """No new requests from now on; the engine goes on until `stop`."""
        if not self._draining.is_set():
            self._enter(State.DRAINING, reason)
            self._draining.set()

    def stop(self) -> None:
        """Makes `run` stop the engine, within the stop timeout, and return. Call `drain` before."""
        self._stopping.set()

    def kill(self) -> None:
        """Kills the engine at once and makes `run` return."""
        if self._process is not None:
            self._process.kill()
        self._stopping.set()

    async def _is_wanted(self) -> bool:
        """Waits until the engine is to run; False where it is never to run again."""
        return not self._draining.is_set()

    async def _after_end(self) -> None:
        """Called when no process of the engine is left."""
        if not self._draining.is_set():
            await self._wait_before_restart()

    @property
    def _lasting(self) -> bool:
        """Whether the engine failed for a reason that another start would meet again."""
        found = self.status.diagnosis
        return found is not None and not found.retry and not self._was_ready

    async def _run_engine(self) -> None:
        """Runs the engine once, from its start until no process of it is left. Engines are started nowhere else."""
        self._reset()
        try:
            engine_socket(self._runtime).unlink(missing_ok=True)
            self._process = process = await EngineProcess.start(self._launch, self._on_line)
        except OSError as error:
            if self.status.state is not State.DRAINING:
                self._fail(f"cannot be started: {error}")
            return
        ended = asyncio.create_task(process.wait())
        working = asyncio.create_task(self._start_and_watch())
        leaving = asyncio.create_task(first_of(*self._leaving))
        stopping = asyncio.create_task(first_of(*self._ending))
        try:
            done, _ = await asyncio.wait({ended, working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if self.status.state is State.DRAINING:
                await self._cancel(working)
                await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            elif ended in done:
                self._fail(describe_exit(ended.result()))
            else:
                self._fail(_fault_of(working))
        finally:
            for task in (working, leaving, stopping):
                await self._cancel(task)
            await process.stop(self._config.stop_timeout)
            exit_text = describe_exit(await ended)
            self._process = None
            self._finish(exit_text, process.output)

    @staticmethod
    async def _cancel(task: "asyncio.Task[Any]") -> None:
        """Cancels repeatedly: before Python 3.12, `wait_for` drops a cancellation that arrives together with its
        result.
        """
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1)

    def _reset(self) -> None:
        self._tracker = ProgressTracker()
        self._pulsed_at = None
        self._faults = []
        self._was_ready = False
        if self.status.state is State.FAILED:
            self._enter(State.STARTING, "restarted", restarts=self.status.restarts + 1)
        self._update(
            reason="the engine process is being started",
            started_at=time.monotonic(),
            progress=None,
            decisions=self._decisions,
            retry_at=None,
            warnings=(),
        )

    async def _start_and_watch(self) -> None:
        """Waits until the engine is ready and then watches it. Ends only by EngineFaultError or cancellation."""
        limit = self._config.start_timeout
        try:
            await asyncio.wait_for(self._wait_until_ready(), limit)
        except asyncio.TimeoutError:
            where = self.status.progress or self.status.state.value
            raise EngineFaultError(f"not ready within {limit:g} s (--start-timeout); it had come to: {where}") from None
        except EngineNotWorkingError as error:
            raise EngineFaultError(f"came up, but does not work: {error}") from error
        await self._watch()

    async def _wait_until_ready(self) -> None:
        await wait_until_it_answers(self._client)
        if self.status.state is State.STARTING:
            self._enter(State.LOADING, "it answers without having told its progress")
        self._enter(State.WARMING, "a first completion is under way", progress=Progress("first completion"))
        proof = await prove(self._client, self._config.served_model_name[0])
        self._failures = 0
        self._was_ready = True
        if self._process is not None:
            self._process.output.serve()
        warnings = (*proof.warnings, *costly(self.status.decisions))
        for warning in warnings:
            log.warning("the engine works, but", warning=warning)
        reason = f"{proof.route} worked {self.status.start_elapsed:.1f} s after the start"
        self._enter(State.READY, reason, progress=None, diagnosis=None, warnings=warnings)

    async def _watch(self) -> None:
        silent_since: float | None = None
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            asked_at = time.monotonic()
            beat = await self._check_heartbeat()
            if beat.pulse is Pulse.DEAD:
                raise EngineFaultError(beat.detail)
            if beat.pulse is Pulse.ALIVE:
                silent_since = None
                if self.status.state is State.DEGRADED:
                    self._enter(State.READY, "it answers again")
                continue
            silent_since = silent_since or asked_at
            if self.status.state is State.READY:
                self._enter(State.DEGRADED, beat.detail)
            if time.monotonic() - silent_since >= self._config.hang_timeout:
                raise EngineFaultError(f"hung: {beat.detail}; gave it {self._config.hang_timeout:g} s (--hang-timeout)")

    async def _check_heartbeat(self) -> Heartbeat:
        """Whether the engine's API process answers, and whether its core still sends pulses, if it ever sent one."""
        beat = await heartbeat(self._client, self._config.heartbeat_timeout)
        limit = self._config.step_timeout
        if beat.pulse is Pulse.ALIVE and self._pulsed_at is not None and time.monotonic() - self._pulsed_at > limit:
            return Heartbeat(Pulse.SILENT, f"its core has ended no step for {limit:g} s (--step-timeout)")
        return beat

    async def _wait_before_restart(self) -> None:
        lasting = self._lasting
        if lasting or self._failures >= MAX_FAILURES:
            why = "since another start would end the same" if lasting else f"after {self._failures} failures in a row"
            log.error("given up", why=why)
            self._update(reason=f"given up {why}; the last: {self.status.reason}", given_up=True)
            await self._draining.wait()
            return
        delay = self._backoff(self._failures)
        log.warning("restart scheduled", seconds=delay, failures=self._failures)
        self._update(retry_at=time.monotonic() + delay)
        try:
            await asyncio.wait_for(self._draining.wait(), delay)
        except asyncio.TimeoutError:
            return

    def _fail(self, reason: str) -> None:
        self._failures += 1
        self._enter(State.FAILED, reason, progress=None, last_exit=reason)

    def _finish(self, exit_text: str, output: EngineOutput) -> None:
        """Adds the engine's last lines and their diagnosis, which are known only once its output has ended.

        /health shows it to everyone. Once the engine has served, the lines stay in the log: they may contain clients'
        text.
        """
        if self.status.state is not State.FAILED:
            self._update(last_exit=exit_text)
            return
        words = output.errors()
        for line in words:
            log.error("engine's last words", line=line)
        faults = [*self._faults, *output.native]
        found = diagnose(Ending.of(self.status.reason, output.evidence, faults))
        if found is not None:
            log.error("diagnosis", what=found.title, cause=found.cause, remedy=" ".join(found.remedy), see=found.docs)
        shown = list(dict.fromkeys(str(fault) for fault in faults))[:SHOWN_WORDS] if output.served else words
        reason = " | ".join([self.status.reason, *shown])
        self._update(reason=reason, last_exit=reason, diagnosis=found)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PulseEvent):
            self._pulsed_at = time.monotonic()
            return
        if isinstance(event, FaultEvent):
            if len(self._faults) < MAX_FAULTS:
                self._faults.append(Fault(event.type, event.message))
            return
        self._tracker.take(event)
        if self.status.state is State.STARTING:
            self._enter(State.LOADING, "the model is being loaded")
        decisions = self._decisions + self._tracker.decisions
        for decision in decisions[len(self.status.decisions) :]:
            log.info("decision", what=decision.what, choice=decision.choice, reason=decision.reason)
        progress = self._tracker.progress if self.status.state is State.LOADING else self.status.progress
        self._update(progress=progress, decisions=decisions)

    def _on_invalid(self, problem: str) -> None:
        log.warning("progress datagram ignored", problem=problem)

    def _on_line(self, level: str, line: str) -> None:
        getattr(engine_log, level)(line)

    def _enter(self, state: State, reason: str, **changes: Any) -> None:
        """The only way into another state."""
        check_transition(self.status.state, state)
        log_method = log.warning if state in {State.FAILED, State.DEGRADED} else log.info
        log_method("state", state=state.value, was=self.status.state.value, reason=reason)
        self._update(state=state, reason=reason, since=time.monotonic(), **changes)

    def _update(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        for listener in self._listeners:
            listener(self.status)


async def first_of(*events: asyncio.Event) -> None:
    """Returns once one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _fault_of(task: "asyncio.Task[None]") -> str:
    """Why watching the engine ended. A fault is a reason; anything else is a bug of ours and raised."""
    error = task.exception()
    if isinstance(error, EngineFaultError):
        return str(error)
    raise error or RuntimeError("the supervisor stopped watching the engine without a reason")
