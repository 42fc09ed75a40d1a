"""A gateway and fake engines in this process, joined without sockets: for what needs many requests or exact timing."""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from server.config.devices import Devices
from server.config.settings import Config, load_config
from server.gateway import Gateway
from server.gateway.exchange import Answer, Exchange, Headers
from server.gateway.limits import Admission
from server.gateway.pool import Pool, Upstream
from server.supervisor import State, Status
from tests.fakes.engine import FakeEngine, Start


def config_of(*flags: str) -> Config:
    return load_config(["--model", "m", *flags], {}, lambda: Devices((), "none"))


@dataclass
class Answered:
    """An answer of an application in this process."""

    status: int
    headers: Headers
    chunks: Callable[[], AsyncIterator[bytes]]


def exchange_through(client: httpx.AsyncClient) -> Exchange:
    """Exchanges with the application behind `client`."""

    @contextlib.asynccontextmanager
    async def exchange(method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        url = httpx.URL("http://engine").copy_with(raw_path=target)
        response = await client.send(client.build_request(method, url, headers=headers, content=body), stream=True)
        fields = [(name.lower(), value) for name, value in response.headers.raw]
        yield Answered(response.status_code, fields, response.aiter_raw)
        await response.aclose()

    return exchange


@dataclass
class Engine:
    """A fake engine, ready from the first moment; `status` is what its supervisor would say."""

    name: str = ""
    models: tuple[str, ...] = ("m",)
    status: Status = field(
        default_factory=lambda: Status(State.READY, "for a test", time.monotonic(), time.monotonic())
    )
    node: str = ""
    exchange: Exchange | None = None  # instead of one with `fake`
    fake: FakeEngine = field(init=False)

    def __post_init__(self) -> None:
        self.fake = FakeEngine(Path("/nonexistent"), list(self.models), Start())

    def enter(self, state: State) -> None:
        self.status = replace(self.status, state=state, reason=f"{state.value} for a test")

    def upstream(self, config: Config) -> Upstream:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(self.fake.app), base_url="http://engine", timeout=60)
        admission = Admission(config.max_in_flight, config.queue_size, config.queue_timeout)
        own = config.model_copy(update={"name": self.name, "served_model_name": self.models})
        exchange = self.exchange or exchange_through(client)
        return Upstream(own, client, exchange, lambda: self.status, admission, self.node)


class InProcess:
    """The gateway of `flags` before `engines` (one called m by default), and a client of it."""

    def __init__(self, *flags: str, engines: tuple[Engine, ...] = ()) -> None:
        config = config_of(*flags)
        self.engines = engines or (Engine(),)
        self.serve(config, [engine.upstream(config) for engine in self.engines])

    def serve(self, config: Config, upstreams: list[Upstream]) -> None:
        self.pool = Pool(upstreams)
        self.gateway = Gateway(config, self.pool)
        self.client = self.connect()

    def connect(self, address: str = "192.0.2.1") -> httpx.AsyncClient:
        """A client at `address`."""
        transport = httpx.ASGITransport(self.gateway.app, raise_app_exceptions=False, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60)

    async def ask(self, key: str = "", client: httpx.AsyncClient | None = None, **body: Any) -> httpx.Response:
        """A completion."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        content = {"model": "m", "prompt": "Hi", **body}
        return await (client or self.client).post("/v1/completions", json=content, headers=headers)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object; fails where the body is not in OpenAI's form."""
    body = json.loads(response.text)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
