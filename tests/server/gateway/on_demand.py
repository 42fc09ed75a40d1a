"""Engines on demand without processes: a test says when each becomes ready, fails, or is gone."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from server.config.on_demand import OnDemand
from server.diagnosis import Diagnosis
from server.gateway.demand import Demand
from server.gateway.swap import Swap
from server.supervisor import State, Status
from server.supervisor.states import check_transition
from tests.server.gateway.inprocess import Engine, InProcess, config_of


class Scripted:
    """What an OnDemandSupervisor does, on a test's word. `log` has what was asked of it."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.status = Status(State.STOPPED, "no request has asked for it", now, now)
        self.occupied = False
        self.log: list[str] = []
        self._listeners: list[Callable[[Status], None]] = []

    def current(self) -> Status:
        return self.status

    def subscribe(self, listener: Callable[[Status], None]) -> None:
        self._listeners.append(listener)

    def start(self) -> None:
        assert not self.occupied
        self.occupied = True
        self.log.append("start")
        self.enter(State.STARTING)

    def retire(self, reason: str) -> None:
        self.log.append(f"retire: {reason}")
        self.enter(State.DRAINING)

    def rest(self) -> None:
        assert self.status.state is State.DRAINING
        self.log.append("rest")

    def up(self) -> None:
        """The engine becomes ready."""
        for state in (State.LOADING, State.WARMING, State.READY):
            self.enter(state)

    def gone(self) -> None:
        """The last process of a retired engine has ended."""
        self.occupied = False
        self.enter(State.STOPPED)

    def fail(self, retry_in: float, diagnosis: Diagnosis | None = None) -> None:
        """The engine has failed, and no process of it is left."""
        self.enter(State.FAILED)
        self.occupied = False
        self.enter(State.FAILED, retry_at=time.monotonic() + retry_in, diagnosis=diagnosis)

    def enter(self, state: State, **changes: Any) -> None:
        if state is not self.status.state:
            check_transition(self.status.state, state)
        changes = {"reason": state.value, **changes}
        self.status = replace(self.status, state=state, since=time.monotonic(), **changes)
        for listener in self._listeners:
            listener(self.status)


class Swapping(InProcess):
    """A gateway before engines on demand; each model by its places, as `a="GPU 0"` or `b="GPU 0,GPU 1"`."""

    def __init__(self, *flags: str, times: dict[str, float] | None = None, **places: str) -> None:
        self.scripts = {name: Scripted() for name in places}
        engines = tuple(Engine(name, (name,)) for name in places)
        super().__init__(*flags, engines=engines)
        options = {"min_residence": 0.0, **(times or {})}
        upstreams = []
        self.demands: dict[str, Demand] = {}
        for upstream in self.pool.upstreams:
            script = self.scripts[upstream.name]
            own = OnDemand(places=frozenset(places[upstream.name].split(",")), **options)
            limit = upstream.config.queue_size
            demand = Demand(upstream.name, script, upstream.admission, own, limit, lambda why: None)
            self.demands[upstream.name] = demand
            upstreams.append(replace(upstream, status=script.current, demand=demand))
        self.swap = Swap(list(self.demands.values()))
        self.serve(config_of(*flags), upstreams)

    def __getitem__(self, name: str) -> Scripted:
        return self.scripts[name]

    def finished(self, name: str) -> int:
        """Requests that the model's fake engine has answered."""
        return int(next(engine.fake.stats["finished"] for engine in self.engines if engine.name == name))

    def asking(self, model: str, **body: Any) -> "asyncio.Task[Any]":
        """A request under way."""
        return asyncio.create_task(self.ask(model=model, **body))


async def settle() -> None:
    """Lets everything happen that needs no time."""
    for _ in range(30):
        await asyncio.sleep(0)
