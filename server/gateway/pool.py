"""The engines behind the gateway, and which of them answers a request: of those that serve the model the least busy."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from math import ceil

import httpx

from server.config import Config
from server.gateway.errors import APIError
from server.gateway.exchange import Exchange
from server.gateway.limits import Admission
from server.supervisor import State, Status


@dataclass(frozen=True)
class Upstream:
    """One engine: what it was started from, how it is reached, its state now, and who is at it.

    Clients' requests go through `exchange`, the gateway's own few through `client`.
    """

    config: Config
    client: httpx.AsyncClient
    exchange: Exchange
    status: Callable[[], Status]
    admission: Admission

    @property
    def name(self) -> str:
        """Its name where there are several; empty otherwise."""
        return self.config.name

    @property
    def models(self) -> tuple[str, ...]:
        """The model names it serves."""
        return self.config.served_model_name

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.status().state is State.READY


class Pool:
    """One or more engines, of which several may serve the same model."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self.upstreams = tuple(upstreams)

    @property
    def running(self) -> int:
        """Requests at the engines."""
        return sum(one.admission.running for one in self.upstreams)

    @property
    def waiting(self) -> int:
        """Requests in the queues."""
        return sum(one.admission.waiting for one in self.upstreams)

    def choose(self, model: object) -> Upstream:
        """The ready engine with the fewest requests among those that serve `model`. One alone gets every request, and
        judges names itself.

        Raises:
            APIError: 400 or 404 where no engine serves the model, 503 where none that does is ready.
        """
        serving = [one for one in self.upstreams if model in one.models] if len(self.upstreams) > 1 else self.upstreams
        if not serving:
            if model is None:
                raise APIError(400, "model_missing", "several models are served here: name one as `model`")
            served = ", ".join(sorted({name for one in self.upstreams for name in one.models}))
            raise APIError(404, "model_not_found", f"the model {str(model)[:100]!r} does not exist; served: {served}")
        ready = [one for one in serving if one.ready]
        if not ready:
            raise not_ready(serving[0].status())
        return min(ready, key=lambda one: one.admission.running + one.admission.waiting)

    def lacking(self) -> list[Upstream]:
        """Engines of models that no engine is ready to serve now."""
        served = {name for one in self.upstreams if one.ready for name in one.models}
        return [one for one in self.upstreams if not served.issuperset(one.models)]

    @contextlib.asynccontextmanager
    async def place(self, model: object) -> AsyncIterator[Upstream]:
        """A place at an engine for `model`. Whoever waited for one that has failed meanwhile goes to another.

        Raises:
            APIError: as `choose`, and as `Admission.enter`.
        """
        upstream = await self._enter(model)
        while not upstream.ready:
            upstream.admission.leave()
            upstream = await self._enter(model)
        try:
            yield upstream
        finally:
            upstream.admission.leave()

    async def _enter(self, model: object) -> Upstream:
        upstream = self.choose(model)
        await upstream.admission.enter()
        return upstream


def not_ready(status: Status) -> APIError:
    """The 503, with Retry-After, of an engine that takes no requests."""
    seconds = 5 if status.retry_at is None else max(1, ceil(status.retry_at - time.monotonic()))
    code = "draining" if status.state is State.DRAINING else "engine_not_ready"
    return APIError(503, code, status.explain(), {"Retry-After": str(seconds)})
