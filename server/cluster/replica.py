"""The gateway's end of one replica: the status that it reports, and the connection to its engine."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx
import structlog

from server.cluster.link import MAX_LINE, PULSE, config_from, gpus_from, greeting, line, status_from
from server.gateway.exchange import CONNECT_LIMIT, EngineGoneError, RemoteEngineSocket
from server.gateway.gpu_metrics import Reading
from server.gateway.limits import Admission
from server.gateway.pool import Upstream
from server.supervisor import State, Status

ANSWER_LIMIT = 10.0  # seconds for the gateway's own requests that have no limit of theirs
RETRY = 1.0  # seconds between two attempts to reach a replica

log = structlog.get_logger("voltserve.cluster")


_T = TypeVar("_T")


class ReplicaLostError(Exception):
    """A replica's status connection has ended; says how."""


@dataclass(frozen=True)
class Address:
    """Where a replica is: `id` is Ray's for it, `model` the name in cluster.yaml."""

    id: str
    model: str
    host: str
    port: int
    secret: str


class Replica:
    """One replica. `status` is its last report, or says that it cannot be reached. `upstream` exists once it has sent
    its configuration.

    Args:
        address: where it is.
        silence: seconds without a message from it until its requests are broken off.
        on_change: called when there is a new status.
    """

    def __init__(self, address: Address, silence: float, on_change: Callable[["Replica"], None]) -> None:
        now = time.monotonic()
        self.address = address
        self.name = f"{address.model}-{address.id}"
        self.status = Status(State.STARTING, "it has not answered yet", since=now, started_at=now)
        self.upstream: Upstream | None = None
        self.gpus: list[Reading] = []
        self.linked = False
        self._silence = silence
        self._on_change = on_change
        self._exchange = RemoteEngineSocket(address.host, address.port, greeting(address.secret, "engine"))

    async def run(self) -> None:
        """Keeps the status connection open until a draining replica has ended. Its requests are broken off then, and
        likewise on cancellation.
        """
        try:
            while self.status.state is not State.DRAINING:
                try:
                    await self._listen()
                except (OSError, ValueError, KeyError, TypeError) as error:
                    self._lost(f"{type(error).__name__} {error}".strip())
                except ReplicaLostError as error:
                    self._lost(str(error))
                await asyncio.sleep(RETRY)
        finally:
            self._exchange.break_off("its replica is gone")

    async def _listen(self) -> None:
        opening = asyncio.open_connection(self.address.host, self.address.port, limit=MAX_LINE)
        reader, writer = await _within(CONNECT_LIMIT, opening, "no connection to it")
        writer.write(greeting(self.address.secret, "status"))
        self.linked = True
        reporting = asyncio.create_task(self._report_load(writer))
        try:
            while True:
                text = await _within(self._silence, reader.readline(), "no word from it")
                if not text.endswith(b"\n"):
                    raise ReplicaLostError("it closed the connection")
                self._take(json.loads(text))
        finally:
            self.linked = False
            reporting.cancel()
            writer.transport.abort()

    def _take(self, message: dict[str, Any]) -> None:
        if "config" in message and self.upstream is None:
            config = config_from(message["config"]).model_copy(update={"name": self.name})
            admission = Admission(config.max_in_flight, config.queue_size, config.queue_timeout)
            client = httpx.AsyncClient(
                transport=_Through(self._exchange), base_url="http://engine", timeout=ANSWER_LIMIT
            )
            host = self.address.host
            self.upstream = Upstream(config, client, self._exchange, lambda: self.status, admission, host)
        if "gpus" in message:
            self.gpus = gpus_from(message["gpus"], self.name)
        if "status" in message:
            self._enter(status_from(message["status"]))
            if self.status.state is State.DRAINING:
                self._exchange.retire()  # what is left are requests, for whose end the replica waits
            elif self.status.state is State.FAILED:
                self._exchange.break_off_soon("it was given up")  # one that hangs would keep them until it is killed

    def _lost(self, why: str) -> None:
        self._exchange.break_off(f"{self.address.host}: {why}")
        if self.status.state in {State.READY, State.DEGRADED}:
            now = time.monotonic()
            log.warning("replica lost", replica=self.name, host=self.address.host, reason=why)
            self._enter(replace(self.status, state=State.DEGRADED, reason=f"unreachable: {why}", since=now))

    def _enter(self, status: Status) -> None:
        if status.state is not self.status.state:
            log.info("replica", replica=self.name, state=status.state.value, reason=status.reason)
        self.status = status
        self._on_change(self)

    async def _report_load(self, writer: asyncio.StreamWriter) -> None:
        while True:
            admission = self.upstream.admission if self.upstream else None
            load = admission.running + admission.waiting if admission else 0
            writer.write(line(load=load))
            await asyncio.sleep(PULSE)


async def _within(limit: float, awaitable: Awaitable[_T], what: str) -> _T:
    try:
        return await asyncio.wait_for(awaitable, limit)
    except asyncio.TimeoutError:
        raise ReplicaLostError(f"{what} for {limit:g} s") from None


class _Through(httpx.AsyncBaseTransport):
    """Sends the gateway's own few requests over its clients' exchange. Answers are read as a whole."""

    def __init__(self, exchange: RemoteEngineSocket) -> None:
        self._exchange = exchange

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request, within the time that its `read` limit gives."""
        limit = request.extensions.get("timeout", {}).get("read")
        try:
            return await asyncio.wait_for(self._ask(request), limit)
        except EngineGoneError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except asyncio.TimeoutError as error:
            raise httpx.ReadTimeout(f"no answer within {limit} s", request=request) from error

    async def _ask(self, request: httpx.Request) -> httpx.Response:
        left_out = {b"host", b"content-length", b"connection"}
        headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in left_out]
        body = await request.aread()
        async with self._exchange(request.method, request.url.raw_path, headers, body) as answer:
            content = b"".join([chunk async for chunk in answer.chunks()])
            return httpx.Response(answer.status, headers=answer.headers, content=content)
