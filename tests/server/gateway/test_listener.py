"""Input that is too large, too slow, or no HTTP is refused in OpenAI's form, or the connection is closed."""

import asyncio
import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.gateway import listener
from server.gateway.listener import MAX_HEAD, http_server
from tests.server.gateway.inprocess import InProcess

LIMIT = 20.0  # seconds after which a test gives up: a bound on a hang, not a check of speed
JSON = b"content-type: application/json"
BODY = b'{"model": "m", "prompt": "Hi"}'
WHOLE = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
SLOW_BODY = b'{"model": "m", "prompt": "Hi", "fake": {"tokens": 8, "delay": 0.1}}'


@dataclass
class Client:
    """A connection to the gateway, by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """The next response's status and body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split(b" ", 2)[1]), await asyncio.wait_for(self.reader.readexactly(length), LIMIT)

    async def refused(self) -> tuple[int, str]:
        """An error's status and code; the connection is closed after it."""
        status, body = await self.answer()
        assert await self.closed()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["code"]

    async def closed(self) -> bool:
        """Whether nothing more arrives, and the connection ends."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), LIMIT) == b""
        return True


class Listening(InProcess):
    """A gateway that listens on a port of the loopback interface."""

    port = 0
    clients: list[Client]

    async def open(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    def refusals(self) -> dict[str, float]:
        """How many requests were refused, by code."""
        samples = [one for family in self.gateway.metrics.refused.collect() for one in family.samples]
        return {one.labels["code"]: one.value for one in samples if one.name.endswith("_total")}


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listening]:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT", 0.4)
    async with listening(Listening(), body_timeout=0.4) as one:
        yield one


@pytest.fixture
async def echo() -> AsyncIterator[Listening]:
    """A listener whose application returns what it received."""
    one = Listening()
    one.gateway.app = _say_what_came
    async with listening(one, body_timeout=LIMIT) as ready:
        yield ready


async def _say_what_came(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await request.body()
    came = {
        "path": scope["path"],
        "sum": hashlib.sha256(body).hexdigest(),
        "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
    }
    await JSONResponse(came)(scope, receive, send)


@contextlib.asynccontextmanager
async def listening(one: Listening, body_timeout: float) -> AsyncIterator[Listening]:
    one.clients = []
    server = http_server(one.gateway, body_timeout=body_timeout)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one.port = listening.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        yield one
        for client in one.clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()
        server.should_exit = True
        await serving


async def test_a_sound_request_is_answered_and_the_connection_kept(here: Listening) -> None:
    client = await here.open()
    for _ in range(3):
        client.send(WHOLE)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("step", [5, 60, 1000])
async def test_a_request_in_pieces_is_answered(here: Listening, step: int) -> None:
    client = await here.open()
    for at in range(0, len(WHOLE), step):
        client.send(WHOLE[at : at + step])
        await asyncio.sleep(0.005)
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * MAX_HEAD + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * MAX_HEAD + b"\r\n",
        b"GET /" + b"a" * MAX_HEAD + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 20 * MAX_HEAD,  # and no end
        b"GET /" + b"a" * 20 * MAX_HEAD,
    ],
    ids=["one field", "many fields", "target", "endless field", "endless target"],
)
async def test_a_head_that_is_too_large_is_a_431(here: Listening, head: bytes) -> None:
    client = await here.open()
    with contextlib.suppress(ConnectionError):
        client.send(head)
        assert await client.refused() == (431, "headers_too_large")
    await asyncio.sleep(0)
    assert here.refusals() == {"headers_too_large": 1}


async def test_the_limit_of_a_head_is_exact(here: Listening) -> None:
    client = await here.open()
    fields = b"/health" + b"host: x\r\n" + b"x-a: \r\n"
    for more, status in ((0, 200), (1, 431)):
        field = b"a" * (MAX_HEAD - len(fields) + more)
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + field + b"\r\n\r\n")
        assert (await client.answer())[0] == status


async def test_a_head_that_does_not_end_is_a_408(here: Listening) -> None:
    client = await here.open()
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
    trickling = asyncio.create_task(_trickle(client, b"a"))
    assert await client.refused() == (408, "request_timeout")
    trickling.cancel()
    assert here.refusals() == {"request_timeout": 1}


async def test_a_connection_that_says_nothing_is_closed(here: Listening) -> None:
    client = await here.open()
    assert await client.closed()
    assert here.refusals() == {}


async def test_a_second_request_may_not_be_slower_than_the_first(here: Listening) -> None:
    client = await here.open()
    client.send(WHOLE)
    assert (await client.answer())[0] == 200
    client.send(WHOLE[:30])
    assert await client.refused() == (408, "request_timeout")


async def test_a_body_that_comes_too_slowly_is_a_408_and_no_request_of_the_engine(here: Listening) -> None:
    client = await here.open()
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    )
    trickling = asyncio.create_task(_trickle(client, b" "))
    assert await client.refused() == (408, "request_timeout")
    trickling.cancel()
    await asyncio.sleep(0.05)
    metrics = here.gateway.metrics
    assert metrics.requests.labels("/v1/completions", "POST", "408")._value.get() == 1
    assert [one for family in metrics.client_disconnects.collect() for one in family.samples] == []
    assert here.engines[0].fake.stats["finished"] == 0


async def test_a_slow_body_that_nobody_wants_is_closed_after_its_answer(here: Listening) -> None:
    client = await here.open()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    assert (await client.answer())[0] == 200
    assert await client.closed()


async def test_a_long_answer_is_not_cut_off_by_the_limits_on_a_request(here: Listening) -> None:
    client = await here.open()
    slow = WHOLE.replace(BODY, SLOW_BODY).replace(b"length: %d" % len(BODY), b"length: %d" % len(SLOW_BODY))
    client.send(slow + WHOLE[:20])  # and the beginning of a further request, which waits that long too
    status, body = await client.answer()
    assert status == 200
    assert "字7".encode() in json.dumps(json.loads(body), ensure_ascii=False).encode()
    client.send(WHOLE[20:])
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["TLS", "HTTP/2", "no field", "no chunk"],
)
async def test_what_is_no_http_is_a_400(here: Listening, raw: bytes) -> None:
    client = await here.open()
    client.send(raw)
    assert await client.refused() == (400, "invalid_http")


def post(path: str, body: bytes, *fields: bytes, chunked: bool = False) -> bytes:
    """A request with a body, of which `fields` are further header fields."""
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path.encode(), b"".join(field + b"\r\n" for field in fields))
    if not chunked:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    parts = [body[at : at + 7000] for at in range(0, len(body), 7000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def told(answer: tuple[int, bytes]) -> dict[str, Any]:
    status, body = answer
    assert status == 200, body
    came: dict[str, Any] = json.loads(body)
    return came


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("size", [2**10, 60_000, 65_000, 70_000, 100_000, 300_000, 2 * 2**20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_any_size_may_come_together_with_its_head(echo: Listening, size: int, chunked: bool) -> None:
    client = await echo.open()
    body = bytes(range(256)) * (size // 256)
    for index in range(3):  # what is left from the request before counts as little
        client.send(post(f"/{index}", body, chunked=chunked))
        came = told(await client.answer())
        assert (came["path"], came["sum"]) == (f"/{index}", digest(body))
    assert echo.refusals() == {}


async def test_a_large_body_arrives_whole_wherever_the_first_part_of_its_request_ends(echo: Listening) -> None:
    body = bytes(range(256)) * 600
    request = post("/split", body, b"x-a: b")
    client = await echo.open()
    for at in range(1, request.index(b"\r\n\r\n") + 8):
        client.send(request[:at])
        await client.writer.drain()
        await asyncio.sleep(0)
        client.send(request[at:])
        assert told(await client.answer())["sum"] == digest(body), at
    assert echo.refusals() == {}


@pytest.mark.parametrize("field", [10, 3000])
@pytest.mark.parametrize("count", [30, 200])
async def test_requests_that_come_at_once_are_answered_in_their_order(echo: Listening, field: int, count: int) -> None:
    client = await echo.open()
    one = b" HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * field + b"\r\n\r\n"
    client.send(b"".join(b"GET /%d" % index + one for index in range(count)))
    assert [told(await client.answer())["path"] for _ in range(count)] == [f"/{index}" for index in range(count)]
    assert echo.refusals() == {}


@pytest.mark.parametrize("size", [1000, 70_000, 2**20])
async def test_bodies_that_come_at_once_are_told_apart(echo: Listening, size: int) -> None:
    client = await echo.open()
    bodies = [bytes([index]) * size for index in range(8)]
    client.send(b"".join(post(f"/{index}", body, chunked=index % 2 == 1) for index, body in enumerate(bodies)))
    for index, body in enumerate(bodies):
        came = told(await client.answer())
        assert (came["path"], came["sum"]) == (f"/{index}", digest(body))


async def test_a_connection_that_sends_much_ahead_is_not_read_further_and_loses_nothing(here: Listening) -> None:
    client = await here.open()
    slow = b'{"model": "m", "prompt": "Hi", "fake": {"tokens": 10, "delay": 0.1}}'
    flood = post("/v1/completions", BODY + b" " * 100_000, JSON)
    client.send(post("/v1/completions", slow, JSON) + 100 * flood)
    await asyncio.sleep(0.5)
    assert client.writer.transport.get_write_buffer_size() > 2**20, "it took in what it does not answer yet"
    assert [(await client.answer())[0] for _ in range(101)] == [200] * 101


async def test_an_oversized_head_is_refused_after_the_answer_to_what_came_before(here: Listening) -> None:
    client = await here.open()
    slow = b'{"model": "m", "prompt": "Hi", "fake": {"tokens": 3, "delay": 0.1}}'
    before = post("/v1/completions", slow, JSON)
    client.send(before + b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 20 * MAX_HEAD)
    assert (await client.answer())[0] == 200
    assert await client.refused() == (431, "headers_too_large")
    assert here.refusals() == {"headers_too_large": 1}


async def test_who_is_refused_gets_to_read_why_though_it_sends_on(here: Listening) -> None:
    for _ in range(20):
        client = await here.open()
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 200 * MAX_HEAD)
        assert await client.refused() == (431, "headers_too_large")


async def test_a_client_that_leaves_ends_its_generation_though_a_further_request_waits(here: Listening) -> None:
    client = await here.open()
    long = b'{"model": "m", "prompt": "Hi", "fake": {"tokens": 3000, "delay": 0.01}}'
    client.send(post("/v1/completions", long, JSON) + WHOLE)
    await asyncio.sleep(0.2)
    assert here.gateway.in_flight.count == 1
    client.writer.close()
    await asyncio.wait_for(here.gateway.in_flight.wait_for_none(), LIMIT)


@pytest.mark.parametrize("where", ["trailer", "line of a chunk's size"])
async def test_what_may_follow_a_chunk_is_bounded_too(here: Listening, where: str) -> None:
    client = await here.open()
    start = b"0\r\nx-a: " if where == "trailer" else b"1;x="
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b\r\ntransfer-encoding: chunked\r\n\r\n%b" % (JSON, start)
    )
    for _ in range(20):
        client.send(b"a" * MAX_HEAD)
    assert await client.refused() == (431, "headers_too_large")


async def test_trailers_are_no_header_fields(echo: Listening) -> None:
    client = await echo.open()
    request = post("/", b"abc", chunked=True)
    client.send(request[:-2] + b"authorization: Bearer evil\r\n\r\n")
    came = told(await client.answer())
    assert came["sum"] == digest(b"abc")
    assert [name for name, _ in came["headers"]] == ["host", "transfer-encoding"]


H2C = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAAB")  # as Java's
WEBSOCKET = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13")


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET, (b"connection: close, upgrade", b"upgrade: h2c")])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("step", [1, 37, 10**9])
async def test_a_wish_to_change_the_protocol_is_ignored(
    echo: Listening, wish: tuple[bytes, ...], chunked: bool, step: int
) -> None:
    client = await echo.open()
    body = bytes(range(256)) * {1: 1, 37: 10}.get(step, 400)
    closes = wish[0].startswith(b"connection: close")
    request = (1 if closes else 3) * post("/h2c", body, *wish, chunked=chunked)
    if not closes:
        request += b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n"
    for at in range(0, len(request), step):
        client.send(request[at : at + step])
        await asyncio.sleep(0)
    for _ in range(1 if closes else 3):
        came = told(await client.answer())
        assert came["sum"] == digest(body)
        assert ["connection", wish[0].decode().partition(": ")[2]] in came["headers"]
        assert "upgrade" not in dict(came["headers"])
    if closes:
        assert await client.closed()
    else:
        assert told(await client.answer())["path"] == "/last"


async def test_a_websocket_is_answered_like_any_other_request(here: Listening) -> None:
    client = await here.open()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"\r\n".join(WEBSOCKET) + b"\r\n\r\n")
    assert (await client.answer())[0] == 200


async def test_connect_is_told_that_this_is_no_proxy(here: Listening) -> None:
    client = await here.open()
    client.send(b"CONNECT api.example:443 HTTP/1.1\r\nhost: api.example:443\r\n\r\n\x16\x03\x01")
    assert await client.refused() == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("version", "hosts", "sound"),
    [
        (b"1.1", (b"x",), True),
        (b"1.1", (b"gateway_1.local:8000",), True),
        (b"1.1", (b"[::1]:8000",), True),
        (b"1.1", (b"",), True),
        (b"1.0", (), True),
        (b"1.0", (b"x",), True),
        (b"1.1", (), False),
        (b"1.1", (b"x", b"x"), False),
        (b"1.0", (b"x", b"y"), False),
        (b"1.1", (b"x y",), False),
        (b"1.1", (b"x/y",), False),
        (b"1.1", (b"x:80a",), False),
    ],
)
async def test_a_request_names_its_host_once(
    here: Listening, version: bytes, hosts: tuple[bytes, ...], sound: bool
) -> None:
    client = await here.open()
    fields = b"".join(b"Host: %b\r\n" % host for host in hosts)
    client.send(b"GET /health HTTP/%b\r\n%b\r\n" % (version, fields))
    if sound:
        assert (await client.answer())[0] == 200
    else:
        assert await client.refused() == (400, "invalid_http")


@pytest.mark.parametrize("size", [70_000, 100_000, 1_000_000])
async def test_openai_s_client_may_ask_long_questions_from_several_threads(here: Listening, size: int) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{here.port}/v1", api_key="x", max_retries=0)
    texts: list[str] = []

    def ask() -> None:
        texts.extend(client.completions.create(model="m", prompt="x" * size).choices[0].text for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, LIMIT)
    client.close()
    assert texts == ["字0 字1 字2 "] * 20


async def _trickle(client: Client, byte: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            client.send(byte)
            await asyncio.sleep(0.05)
