"""Requests that wait for an engine on demand: a bounded queue in order of arrival, and reports to each meanwhile."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from structlog.contextvars import bound_contextvars

from server.config.on_demand import IDLE_SHARE, OnDemand
from server.gateway.errors import APIError
from server.gateway.limits import Admission
from server.supervisor import State, Status

TELL_INTERVAL = 5.0  # seconds between two comments in a stream that waits; proxies close silent ones after 30 or 60
# Seconds in which a request whose turn it is must go to the engine. One of a client that reads nothing may not go.
TURN_LIMIT = 1.0
RETRY = 10  # seconds after which a request that found the queue full may try again

Tell = Callable[[str], Awaitable[None]]

_STARTING = {State.STARTING, State.LOADING, State.WARMING}


class Startable(Protocol):
    """What starts and stops the engine: an OnDemandSupervisor, which documents the methods."""

    @property
    def status(self) -> Status:
        """The engine's state now."""

    @property
    def occupied(self) -> bool:
        """Whether anything of the engine may use its places."""

    def subscribe(self, listener: Callable[[Status], None]) -> None:
        """Calls `listener` with each new status."""

    def start(self) -> None:
        """Starts the engine."""

    def retire(self, reason: str) -> None:
        """Ends new requests."""

    def rest(self) -> None:
        """Stops the retired engine."""


@dataclass(eq=False)
class _Waiter:
    """A request. `turn` becomes None when it may proceed, or the error to answer with."""

    turn: "asyncio.Future[APIError | None]"
    since: float


@dataclass
class Counts:
    """What has happened since the gateway began. `waits` requests waited `waited` seconds in total."""

    starts: int = 0
    swaps: int = 0
    idle_stops: int = 0
    waits: int = 0
    waited: float = 0.0


@dataclass(eq=False)
class Demand:
    """An engine on demand, its queue, and since when it is in use. server/gateway/swap.py decides for it.

    Attributes:
        name: the engine's.
        engine: starts and stops it.
        admission: who is at the engine.
        options: when it may leave.
        limit: requests that may wait, at least one; more are refused.
        break_off: ends the requests at the engine.
        waits_for: what stands between the waiting requests and the engine, in words.
        poke: has the decisions made again, soon.
        closed: the gateway is ending.
    """

    name: str
    engine: Startable
    admission: Admission
    options: OnDemand
    limit: int
    break_off: Callable[[str], None]
    waits_for: str = ""
    poke: Callable[[], None] = lambda: None
    closed: bool = False
    counts: Counts = field(default_factory=Counts)
    _waiters: deque[_Waiter] = field(default_factory=deque)
    _used_at: float = 0.0
    _ready_at: float = 0.0
    _turns_at: float = 0.0
    _residence: float = 0.0
    _state: State = State.STOPPED
    _drain_limit: float = 0.0

    def __post_init__(self) -> None:
        self.engine.subscribe(self._observe)

    @property
    def status(self) -> Status:
        """The engine's."""
        return self.engine.status

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiters)

    @property
    def waiting_since(self) -> float | None:
        """When the oldest request without a turn came; None where there is none."""
        return next((waiter.since for waiter in self._waiters if not waiter.turn.done()), None)

    @property
    def startable(self) -> bool:
        """Whether a request for the model can be answered, now or after a start."""
        status = self.status
        if status.state is not State.FAILED or status.retry_at is None:
            return not self.closed
        lasts = status.diagnosis is not None and not status.diagnosis.retry
        return not (self.closed or lasts or self._refused_for())

    async def enter(self, tell: Tell | None = None) -> None:
        """Returns when a request may go to the engine. Then `admission.leave` and `left` end its stay.

        Raises:
            APIError: as `pass_through` and as `Admission.enter`.
        """
        await self.pass_through(tell)
        try:
            await self.admission.enter()
        except BaseException:
            self.left()  # it may have been the last that a drain waits for
            raise

    async def pass_through(self, tell: Tell | None = None) -> None:
        """Returns when the engine is ready and no earlier request waits for it.

        Args:
            tell: is told every few seconds, in words, why the request waits.

        Raises:
            APIError: 503 with Retry-After: the queue is full, the engine could not be started, or the gateway ends.
        """
        if self.status.state is State.READY and not self._waiters:
            return
        if refusal := self._refusal():
            raise refusal
        if len(self._waiters) >= max(1, self.limit):
            message = f"{len(self._waiters)} requests wait for {self.name} to be started; no more are taken"
            raise APIError(503, "queue_full", message, {"Retry-After": str(RETRY)})
        waiter = _Waiter(asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiters.append(waiter)
        self.poke()
        try:
            while not waiter.turn.done():
                await asyncio.wait({waiter.turn}, timeout=TELL_INTERVAL if tell else None)
                if tell is not None and not waiter.turn.done():
                    await tell(self.explain())
        finally:
            self._waiters.remove(waiter)
            self.counts.waits += 1
            self.counts.waited += time.monotonic() - waiter.since
            self.poke()
        if error := waiter.turn.result():
            raise error

    def left(self) -> None:
        """A request has left the engine."""
        self._used_at = time.monotonic()
        if not self.busy:
            self.poke()

    @property
    def busy(self) -> bool:
        """Whether requests are at the engine."""
        return bool(self.admission.running or self.admission.waiting)

    def explain(self) -> str:
        """Why requests wait, in a sentence."""
        if self.status.state in _STARTING:
            return f"{self.name} is being started: {self.status.progress or self.status.state.value}"
        return self.waits_for or f"{self.name} is {self.status.state.value}"

    def may_leave_at(self, now: float) -> float:
        """The time from which another model may have its places. Never while requests wait for its start."""
        if self.status.state in _STARTING:
            return now if self.waiting_since is None else float("inf")
        stays = self._ready_at + self._residence
        if self._waiters:  # they have their turn, and go to the engine now
            return max(stays, self._turns_at + TURN_LIMIT)
        if self.busy:
            return stays
        return min(stays, self._used_at + self._residence / IDLE_SHARE)

    def idle_at(self) -> float:
        """When its idle time-out ends, unless requests arrive."""
        limit = self.options.idle_timeout
        resident = self.status.state is State.READY and not self.busy and not self._waiters
        return self._used_at + limit if limit and resident else float("inf")

    def settle(self, now: float) -> float:
        """Lets waiting requests proceed or fail, and ends a drain. Returns when to look again."""
        state = self.status.state
        if state is State.READY:
            self._answer(None)
        elif state is State.FAILED and not self.engine.occupied:
            if refusal := self._refusal():
                self._answer(refusal)
        elif state is State.DRAINING and not self.closed:
            if not self.busy:
                self.engine.rest()
            elif now >= self._drain_limit:
                self.break_off(
                    f"it made room for another model, {self.options.drain_timeout:g} s after it was asked to"
                )
                self.engine.rest()
            else:
                return self._drain_limit
        return float("inf")

    def start(self) -> None:
        """Starts the engine."""
        self.counts.starts += 1
        with bound_contextvars(engine=self.name):  # in the log
            self.engine.start()

    def retire(self, reason: str, *, idle: bool) -> None:
        """No new requests for the engine; it is stopped when those under way have ended."""
        self._drain_limit = time.monotonic() + self.options.drain_timeout
        self.counts.idle_stops += idle
        self.counts.swaps += not idle
        with bound_contextvars(engine=self.name):
            self.engine.retire(reason)
        self.poke()

    def close(self) -> None:
        """The gateway ends: requests that wait are refused, and so are later ones."""
        self.closed = True
        self._answer(self._refusal())

    def _answer(self, error: APIError | None) -> None:
        for waiter in self._waiters:
            if not waiter.turn.done():
                waiter.turn.set_result(error)
                self._turns_at = time.monotonic()

    def _observe(self, status: Status) -> None:
        if status.state is State.READY and self._state is State.WARMING:
            self._ready_at = self._used_at = time.monotonic()
            self._residence = self.options.residence(status.start_elapsed)
        self._state = status.state
        self.poke()

    def _refused_for(self) -> int:
        """Seconds in which no other start is tried."""
        status = self.status
        if status.state is not State.FAILED or status.retry_at is None:
            return 0
        return max(0, ceil(status.retry_at - time.monotonic()))

    def _refusal(self) -> APIError | None:
        """The error that requests get now; None where they may wait."""
        if self.closed:
            return APIError(503, "draining", self.status.explain(), {"Retry-After": str(RETRY)})
        seconds = self._refused_for()
        if not seconds:
            return None
        found = self.status.diagnosis
        why = f"{found.title}: {found.cause} {' '.join(found.remedy)}" if found else self.status.reason
        message = f"{self.name} could not be started. {why} (the next attempt is made in {seconds} s at the earliest)"
        return APIError(503, "start_failed", message, {"Retry-After": str(seconds)})
