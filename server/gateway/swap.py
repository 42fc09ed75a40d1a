"""Which engines on demand run. Engines with a common GPU, or those that share the CPU, run one at a time.

One order decides: the model whose request has waited longest is served first. Its engine is started where its places
are free. Otherwise each engine in its way is retired as soon as it may leave. It may leave after its residence, or
after a sixth of that without requests. So an engine in use is replaced at most once per residence, however requests
alternate. A retired engine gets no new requests, ends those under way, and is stopped. Only then does the next one
start.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from server.gateway.demand import Demand
from server.supervisor import State

log = structlog.get_logger("voltserve.swap")

_STAY = {State.DRAINING, State.FAILED}  # being stopped already


class Swap:
    """Starts and stops `demands`."""

    def __init__(self, demands: Sequence[Demand]) -> None:
        self.demands = tuple(demands)
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._closed = False
        for demand in self.demands:
            demand.poke = self.poke

    def poke(self) -> None:
        """Decides again, soon."""
        if self._soon is None and not self._closed:
            self._soon = asyncio.get_running_loop().call_soon(self._decide)

    def close(self) -> None:
        """Nothing is started from now on, and requests that wait are refused."""
        self._closed = True
        for demand in self.demands:
            demand.close()
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()

    def _decide(self) -> None:
        self._soon = None
        now = time.monotonic()
        again = [demand.settle(now) for demand in self.demands]
        again += [self._place(demand, now) for demand in self._next()]
        again += [self._stop_idle(demand, now) for demand in self.demands]
        self._decide_at(min(again, default=float("inf")))

    def _next(self) -> list[Demand]:
        """Those to start, the one that has waited longest first; none whose places an earlier one needs."""
        waiting = [(demand.waiting_since, demand) for demand in self.demands]
        in_order = sorted(((since, demand) for since, demand in waiting if since is not None), key=lambda pair: pair[0])
        chosen: list[Demand] = []
        for _, demand in in_order:
            before = next((one for one in chosen if one.options.collides(demand.options)), None)
            if before is None:
                chosen.append(demand)
            else:
                demand.waits_for = f"{demand.name} waits: {before.name} was asked for earlier"
        return [demand for demand in chosen if not demand.engine.occupied]

    def _place(self, demand: Demand, now: float) -> float:
        """Starts an engine, or has those in its way leave. Returns when to look again."""
        held = [
            other
            for other in self.demands
            if other is not demand and other.engine.occupied and other.options.collides(demand.options)
        ]
        if not held:
            demand.waits_for = ""
            demand.start()
            return float("inf")
        staying = [other for other in held if other.status.state not in _STAY]
        leaves_at = max((other.may_leave_at(now) for other in staying), default=now)
        demand.waits_for = _in_words(demand, held, leaves_at - now)
        if leaves_at > now:
            return leaves_at
        for other in staying:
            log.info("makes room", engine=other.name, wanted=demand.name, under_way=other.admission.running)
            other.retire(f"it makes room for {demand.name}", idle=False)
        return float("inf")

    def _stop_idle(self, demand: Demand, now: float) -> float:
        idle_at = demand.idle_at()
        if idle_at > now:
            return idle_at
        demand.retire(f"no request for {demand.options.idle_timeout:g} s", idle=True)
        return float("inf")

    def _decide_at(self, when: float) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if when < float("inf"):
            delay = max(0.0, when - time.monotonic())
            self._later = asyncio.get_running_loop().call_later(delay, self.poke)


def _in_words(demand: Demand, held: Sequence[Demand], seconds: float) -> str:
    parts = []
    for other in held:
        if other.status.state is State.DRAINING and other.busy:
            parts.append(f"{other.name} ends its {other.admission.running} requests")
        elif other.status.state in _STAY:
            parts.append(f"{other.name} is being stopped")
        elif seconds == float("inf"):
            parts.append(f"{other.name} is being started for earlier requests")
        elif seconds > 0:
            parts.append(f"{other.name} is in use and makes room in {seconds:.0f} s at the latest")
    return f"{demand.name} waits: {'; '.join(parts)}"
