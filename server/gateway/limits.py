"""What a client may ask for: how often and how much at once (429), and how long it waits for the engine (503)."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil

from server.gateway.errors import APIError
from server.keys import ApiKey

FORGET_ABOVE = 10_000  # clients remembered; beyond it those at rest are forgotten


@dataclass(frozen=True)
class Client:
    """Who asks: a key's name, or an address where there are no keys. A limit of 0 is none."""

    name: str
    requests_per_minute: int
    max_concurrent: int
    key: ApiKey | None = None

    def may_ask_for(self, model: object) -> bool:
        """Whether its key is for this model, too."""
        return self.key is None or self.key.models is None or model in self.key.models


@dataclass
class _Use:
    """A client's token bucket and its requests under way."""

    tokens: float
    at: float
    running: int = 0


class ClientLimits:
    """Counts each client's requests. A bucket holds a minute's requests, and all of them may arrive at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextlib.contextmanager
    def counted(self, client: Client) -> Iterator[None]:
        """One request, from its arrival to its end.

        Raises:
            APIError: 429 with Retry-After, where the client is over a limit. Such a request is not counted.
        """
        use = self._refilled(client)
        if client.max_concurrent and use.running >= client.max_concurrent:
            message = f"{client.max_concurrent} requests of yours are under way, as many as you may have at once"
            raise APIError(429, "too_many_concurrent_requests", message, {"Retry-After": "1"})
        if client.requests_per_minute:
            if use.tokens < 1:
                seconds = ceil((1 - use.tokens) * 60 / client.requests_per_minute)
                message = f"over your limit of {client.requests_per_minute} requests per minute; next in {seconds} s"
                raise APIError(429, "rate_limit_exceeded", message, {"Retry-After": str(seconds)})
            use.tokens -= 1
        use.running += 1
        try:
            yield
        finally:
            use.running -= 1

    def _refilled(self, client: Client) -> _Use:
        now = self._clock()
        use = self._uses.get(client.name)
        if use is None:
            self._forget(now)
            use = self._uses[client.name] = _Use(client.requests_per_minute, now)
        gained = (now - use.at) * client.requests_per_minute / 60
        use.tokens = min(client.requests_per_minute, use.tokens + gained)
        use.at = now
        return use

    def _forget(self, now: float) -> None:
        """Addresses are many: a client without a request under way whose bucket is full again need not be kept."""
        if len(self._uses) >= FORGET_ABOVE:
            self._uses = {name: use for name, use in self._uses.items() if use.running or now - use.at < 60}


@dataclass
class Admission:
    """At most `running_limit` requests at an engine; up to `waiting_limit` more wait, in order, up to `timeout` s."""

    running_limit: int
    waiting_limit: int
    timeout: float
    running: int = 0
    _turns: "deque[asyncio.Future[None]]" = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._turns)

    async def enter(self) -> None:
        """Returns when the request may go to the engine; `leave` ends its stay.

        Raises:
            APIError: 503 with Retry-After, where the queue is full or the wait was too long.
        """
        if self.running < self.running_limit:
            self.running += 1
            return
        if len(self._turns) >= self.waiting_limit:
            message = f"{self.running} requests are under way and {len(self._turns)} wait; no more are taken"
            raise APIError(503, "queue_full", message, {"Retry-After": "5"})
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await asyncio.wait({turn}, timeout=self.timeout)
        except asyncio.CancelledError:
            if turn.done():
                self.leave()  # the place had just been given to a request that is going away
            else:
                self._turns.remove(turn)
            raise
        if not turn.done():
            self._turns.remove(turn)
            message = f"no place at the engine within {self.timeout:g} s (--queue-timeout)"
            raise APIError(503, "queue_timeout", message, {"Retry-After": "5"})

    def leave(self) -> None:
        """Gives the place to the request that has waited longest."""
        if self._turns:
            self._turns.popleft().set_result(None)
        else:
            self.running -= 1
