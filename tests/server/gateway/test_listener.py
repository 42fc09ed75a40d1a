"""What comes over a socket too large, too slowly, or as no HTTP: refused in OpenAI's form, or the connection closed."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from server.gateway import listener
from server.gateway.listener import MAX_HEAD, http_server
from tests.server.gateway.inprocess import InProcess

LIMIT = 20.0  # seconds after which a test gives up: a bound on a hang, not a check of speed
BODY = b'{"model": "m", "prompt": "Hi"}'
WHOLE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
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
        """Whether nothing more comes, and the connection ends."""
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
    one = Listening()
    one.clients = []
    server = http_server(one.gateway, body_timeout=0.4)
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
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
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


async def test_an_upgrade_is_not_made(here: Listening) -> None:
    client = await here.open()
    client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await client.answer())[0] == 200


async def _trickle(client: Client, byte: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            client.send(byte)
            await asyncio.sleep(0.05)
