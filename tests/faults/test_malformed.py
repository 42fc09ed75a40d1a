"""Ten thousand malformed requests: each is refused in OpenAI's form, none is taken for a sound one, none is a 500."""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from server.gateway import Gateway
from server.gateway.limits import Admission
from server.gateway.pool import Pool, Upstream
from tests.faults.malformed import LIMIT, NO_HTTP, ODD_HTTP, ROUTES, Case, cases
from tests.server.conftest import make_model, serving
from tests.server.gateway.inprocess import Engine, config_of, exchange_through

SEED = 20261129
COUNT = 10_000


class Listener:
    """An engine that takes everything and keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.app = Starlette(routes=[Route(path, self.take, methods=["POST"]) for path in ROUTES])

    async def take(self, request: Request) -> JSONResponse:
        self.bodies.append(await request.body())
        return JSONResponse({"taken": True})


async def ask(gateway: Gateway, case: Case) -> tuple[int, bytes]:
    """One request straight to the application: no socket, no client library."""
    path, _, query = case.path.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": list(case.headers),
        "client": ("192.0.2.1", 1),
        "server": ("gateway", 80),
    }
    halves = [case.body[: len(case.body) // 2], case.body[len(case.body) // 2 :]]
    status, body = 0, b""
    over = False

    async def receive() -> dict[str, Any]:
        if halves:
            return {"type": "http.request", "body": halves.pop(0), "more_body": bool(halves)}
        assert not over, "read on after the response"
        await never.wait()
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    never = asyncio.Event()
    await gateway.app(scope, receive, send)
    over = True
    return status, body


async def test_ten_thousand_malformed_requests_are_refused_and_none_reaches_the_engine_altered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of("--max-body-bytes", str(LIMIT), "--max-prompt-chars", "1000", "--max-sequences", "8")
    listener = Listener()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(listener.app), base_url="http://engine")
    engine = Engine()
    pool = Pool([Upstream(config, client, exchange_through(client), lambda: engine.status, Admission(8, 8, 5.0))])
    gateway = Gateway(config, pool)
    seen: Counter[int] = Counter()
    monkeypatch.setattr(gateway.app, "_log", structlog.testing.CapturingLogger())  # ten thousand lines
    for case in cases(SEED, COUNT):
        before = len(listener.bodies)
        status, body = await ask(gateway, case)
        seen[status] += 1
        if status == 200:
            assert case.sound, case
            assert listener.bodies[before:] == [case.body], case
            continue
        assert 400 <= status < 500, (status, body, case)
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, case
        assert len(body) < 5000, "an error must be short"
        assert len(listener.bodies) == before, case
    assert (pool.running, pool.waiting, gateway.in_flight.count) == (0, 0, 0)
    assert set(seen) >= {200, 400, 404, 405, 413}, seen
    assert sum(seen.values()) == COUNT
    await client.aclose()


def test_malformed_requests_over_a_socket_leave_a_server_that_works(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m"), "--max-body-bytes", str(LIMIT)) as served:
        served.wait_for_state("ready")
        host, port = served.url.removeprefix("http://").split(":")
        for raw in (*NO_HTTP, *ODD_HTTP):
            reply = exchange(host, int(port), raw)
            status = int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else None
            assert status is None or status < 500, raw
            assert raw in ODD_HTTP or status is None or status >= 400, raw
        with httpx.Client(base_url=served.url) as client:
            for case in (one for one in cases(SEED + 1, 150) if not one.sound):
                with contextlib.suppress(httpx.InvalidURL, httpx.LocalProtocolError):
                    answer = client.request(case.method, case.path, content=case.body, headers=case.headers)
                    assert 400 <= answer.status_code < 500, case
        assert served.post().status_code == 200
        assert served.health()[0] == 200
        text = httpx.get(f"{served.url}/metrics").text
        assert "voltserve_requests_in_flight 0.0" in text
        assert "voltserve_requests_queued 0.0" in text
        assert "Traceback" not in served.log.read_text().split("engine")[0]


def exchange(host: str, port: int, raw: bytes) -> bytes:
    """What a server answers to `raw` until it closes, or until half a second passes without a byte."""
    reply = b""
    with socket.create_connection((host, port), 5) as sock, contextlib.suppress(TimeoutError, ConnectionError):
        sock.sendall(raw)
        sock.settimeout(0.5)
        while part := sock.recv(65536):
            reply += part
    return reply


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_makes_the_same_requests(seed: int) -> None:
    assert list(cases(seed, 50)) == list(cases(seed, 50))
