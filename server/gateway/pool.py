"""The engines behind the gateway, and which of them answers a request: of those that serve the model the least busy."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil
from urllib.parse import quote

import httpx

from server.config.settings import Config
from server.gateway.demand import Demand, Tell
from server.gateway.errors import APIError
from server.gateway.exchange import Exchange
from server.gateway.limits import Admission
from server.supervisor import State, Status

LOOK_UP_LIMIT = 5.0  # seconds in which an engine must say whether it keeps a response


@dataclass(frozen=True, eq=False)
class Upstream:
    """One engine: what it was started from, how it is reached, its state now, and who is at it.

    Clients' requests go through `exchange`, the gateway's own few through `client`. `node` is the machine it runs on,
    empty for this one. `demand` is the queue of one that runs only while requests want it.
    """

    config: Config
    client: httpx.AsyncClient
    exchange: Exchange
    status: Callable[[], Status]
    admission: Admission
    node: str = ""
    demand: Demand | None = None

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
    """Engines. Several may serve the same model.

    Args:
        upstreams: the engines; at least one.
        several: whether names distinguish the engines. One that is not gets every request, and judges names itself.
            None: there are several.
    """

    def __init__(self, upstreams: Sequence[Upstream], several: bool | None = None) -> None:
        self.upstreams = tuple(upstreams)
        self.several = len(upstreams) > 1 if several is None else several
        self.on_demand = any(one.demand is not None for one in upstreams)

    @property
    def models(self) -> list[str]:
        """The names that requests can ask for."""
        return sorted({name for one in self.upstreams for name in one.models})

    @property
    def running(self) -> int:
        """Requests at the engines."""
        return sum(one.admission.running for one in self.upstreams)

    @property
    def waiting(self) -> int:
        """Requests in the queues."""
        there = sum(one.admission.waiting for one in self.upstreams)
        return there + sum(one.demand.waiting for one in self.upstreams if one.demand is not None)

    def choose(self, model: object, tried: Collection[Upstream] = ()) -> Upstream:
        """The ready engine with the fewest requests among those that serve `model` and are none of `tried`; an engine
        on another machine is preferred. One engine alone gets every request, and judges names itself. One on demand is
        the only one of its model, and need not be ready.

        Raises:
            APIError: 400 or 404 where no engine serves the model, 503 where none that does is ready.
        """
        serving = [one for one in self.upstreams if model in one.models] if self.several else self.upstreams
        if not serving:
            if model is None:
                message = "several models are served here: name one as `model`"
                raise APIError(400, "model_missing", message, param="model")
            message = f"the model {str(model)[:100]!r} does not exist; served: {', '.join(self.models)}"
            raise APIError(404, "model_not_found", message, param="model")
        if serving[0].demand is not None and serving[0] not in tried:
            return serving[0]
        ready = [one for one in serving if one.ready and one not in tried]
        if not ready:
            raise not_ready(serving[0].status())
        nodes = {one.node for one in tried}
        return min(ready, key=lambda one: (one.node in nodes, one.admission.running + one.admission.waiting))

    def has_other(self, model: object, tried: Collection[Upstream]) -> bool:
        """Whether an engine that serves `model`, and is none of `tried`, is ready."""
        return self.several and any(one.ready and model in one.models and one not in tried for one in self.upstreams)

    def lacking(self) -> list[Upstream]:
        """Engines of models that no engine is ready to serve now, or can be started for."""
        able = (one for one in self.upstreams if (one.ready if one.demand is None else one.demand.startable))
        served = {name for one in able for name in one.models}
        return [one for one in self.upstreams if not served.issuperset(one.models)]

    @contextlib.asynccontextmanager
    async def place(
        self, model: object, response_id: str = "", tried: Collection[Upstream] = (), tell: Tell | None = None
    ) -> AsyncIterator[Upstream]:
        """A place at an engine for `model`, or at the one that keeps the response that the request is about. Whoever
        waited for an engine that has failed meanwhile goes to another. `tell` is for those who wait for a start.

        Raises:
            APIError: as `choose`, as `keeper`, as `Demand.enter` and as `Admission.enter`.
        """
        keeper = await self.keeper(response_id) if response_id and self.several else None
        upstream = await self._enter(model, keeper, tried, tell)
        while not upstream.ready:
            self._leave(upstream)
            upstream = await self._enter(model, keeper, tried, tell)
        try:
            yield upstream
        finally:
            self._leave(upstream)

    @staticmethod
    def _leave(upstream: Upstream) -> None:
        upstream.admission.leave()
        if upstream.demand is not None:
            upstream.demand.left()

    async def keeper(self, response_id: str) -> Upstream:
        """The engine that keeps this response. All ready engines are asked: responses outlive the gateway's
        connections, and each engine decides whether it keeps them.

        Raises:
            APIError: 404 where none does.
        """
        path = f"/v1/responses/{quote(response_id, safe='')}"

        async def keeps(upstream: Upstream) -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return (await upstream.client.get(path, timeout=LOOK_UP_LIMIT)).is_success
            return False

        ready = [one for one in self.upstreams if one.ready]
        for upstream, found in zip(ready, await asyncio.gather(*map(keeps, ready)), strict=True):
            if found:
                return upstream
        message = (
            f"no engine here keeps the response {response_id[:100]!r}; engines keep responses in memory, and only if "
            "started with VLLM_ENABLE_RESPONSES_API_STORE=1"
        )
        raise APIError(404, "response_not_found", message)

    async def _enter(
        self, model: object, keeper: Upstream | None, tried: Collection[Upstream], tell: Tell | None
    ) -> Upstream:
        if keeper is not None and not keeper.ready:
            raise not_ready(keeper.status())
        upstream = keeper or self.choose(model, tried)
        if upstream.demand is None:
            await upstream.admission.enter()
        else:
            await upstream.demand.enter(tell)
        return upstream


def not_ready(status: Status) -> APIError:
    """The 503, with Retry-After, of an engine that takes no requests."""
    seconds = 5 if status.retry_at is None else max(1, ceil(status.retry_at - time.monotonic()))
    code = "draining" if status.state is State.DRAINING else "engine_not_ready"
    return APIError(503, code, status.explain(), {"Retry-After": str(seconds)})
