"""The gateway's view of the cluster: the replicas, as engines of its pool."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from server.cluster.replica import Address, Replica
from server.config.devices import Devices
from server.config.settings import Config, Settings
from server.gateway.exchange import Answer, EngineGoneError
from server.gateway.gpu_metrics import Reading
from server.gateway.limits import Admission
from server.gateway.metrics import Metrics
from server.gateway.pool import Pool, Upstream
from server.supervisor import State, Status


@dataclass(frozen=True)
class Expected:
    """A model: the names that requests ask for, and its fewest replicas."""

    served: tuple[str, ...]
    least: int


class Members:
    """Keeps `pool` in step with the directory, and a connection to each replica. A model that lacks replicas also has a
    stand-in, which is never ready and reports why.

    Args:
        settings: the gateway's.
        models: the expected models, until the directory lists them.
    """

    def __init__(self, settings: Settings, models: Mapping[str, Expected]) -> None:
        self._settings = settings
        self._replicas: dict[str, tuple[Replica, asyncio.Task[None]]] = {}
        self._stand_ins: dict[str, _StandIn] = {}
        self._metrics: Metrics | None = None
        self._observers: dict[str, Callable[[Status], None]] = {}
        self._models: dict[str, Expected] = {}
        self._failures: dict[str, str] = {}
        self._set_models(models)
        self.pool = Pool([absent.upstream for absent in self._stand_ins.values()], several=True)

    def report_to(self, metrics: Metrics) -> None:
        """From now on reports each engine's status to `metrics`."""
        self._metrics = metrics
        self._rebuild_pool()

    def gpus(self) -> list[Reading]:
        """The GPUs of all replicas."""
        return [reading for replica, _ in self._replicas.values() if replica.linked for reading in replica.gpus]

    def take(self, found: Mapping[str, Any]) -> None:
        """Takes the directory's content (`on_ray.directory.Directory.look`). A replica that still answers stays
        although the directory lacks it: the directory may have been restarted.
        """
        self._set_models({one["name"]: Expected(tuple(one["served"]), one["least"]) for one in found["models"]})
        self._failures = found["failures"]
        listed = {one["id"]: one for one in found["replicas"]}
        for name, (replica, task) in list(self._replicas.items()):
            if name not in listed and not replica.linked:
                task.cancel()
                del self._replicas[name]
        for name, one in listed.items():
            if name not in self._replicas:
                replica = Replica(Address(**one), self._settings.heartbeat_timeout, self._on_status)
                task = asyncio.create_task(replica.run())
                task.add_done_callback(partial(self._on_end, name))
                self._replicas[name] = replica, task
        self._rebuild_pool()

    async def close(self) -> None:
        """Ends all connections."""
        tasks = [task for _, task in self._replicas.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_models(self, models: Mapping[str, Expected]) -> None:
        if models == self._models:
            return
        self._models = dict(models)
        self._stand_ins = {name: _StandIn(self._settings, name, one.served) for name, one in models.items()}

    def _on_end(self, name: str, task: "asyncio.Task[None]") -> None:
        """Called when a replica has ended in order."""
        if not task.cancelled() and self._replicas.pop(name, None) is not None:
            self._rebuild_pool()
            task.result()

    def _on_status(self, replica: Replica) -> None:
        """Called when a replica has a new status."""
        if replica.upstream is not None and replica.upstream not in self.pool.upstreams:
            self._rebuild_pool()
        elif replica.name in self._observers:
            self._observers[replica.name](replica.status)

    def _rebuild_pool(self) -> None:
        """Rebuilds the pool: replicas that have sent their configuration, and a stand-in for each model that lacks
        replicas.
        """
        there = [replica for replica, _ in self._replicas.values() if replica.upstream is not None]
        counts = Counter(replica.address.model for replica in there)
        absent = []
        for name, one in self._stand_ins.items():
            if counts[name] < self._models[name].least:
                one.report(counts[name], self._models[name].least, self._failures.get(name, ""))
                absent.append(one.upstream)
        self.pool.upstreams = (*(replica.upstream for replica in there if replica.upstream), *absent)
        if self._metrics is None:
            return
        names = {upstream.name: upstream for upstream in self.pool.upstreams}
        for name in self._observers.keys() - names.keys():
            del self._observers[name]
            self._metrics.forget(name)
        for name in names.keys() - self._observers.keys():
            self._observers[name] = self._metrics.observer(name)
            self._observers[name](names[name].status())


class _StandIn:
    """A stand-in for the replicas that a model lacks."""

    def __init__(self, settings: Settings, name: str, served: tuple[str, ...]) -> None:
        own = settings.model_dump() | {"served_model_name": served}
        none: dict[str, Any] = {"engine": {}, "env": {}, "sources": {}, "decisions": (), "gpus_needed": 0}
        config = Config(**own, **none, devices=Devices(()), name=name)
        client = httpx.AsyncClient(transport=_NoTransport(), base_url="http://engine")
        self._status = Status(State.STARTING, "", since=time.monotonic(), started_at=time.monotonic())
        self.upstream = Upstream(config, client, _no_exchange, lambda: self._status, Admission(1, 0, 1.0))

    def report(self, there: int, least: int, failure: str) -> None:
        """Updates the reason: how many of the expected replicas exist, and why the last one failed."""
        reason = f"{there} of {least} replicas are there; `voltserve cluster status` says what Ray waits for"
        if failure:
            reason = f"{there} of {least} replicas are there; the last one: {failure}"
        if reason != self._status.reason:
            state = State.FAILED if failure else State.STARTING
            self._status = Status(state, reason, since=time.monotonic(), started_at=time.monotonic())


class _NoTransport(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("there is no replica", request=request)


def _no_exchange(*_: object) -> contextlib.AbstractAsyncContextManager[Answer]:
    raise EngineGoneError("there is no replica")
