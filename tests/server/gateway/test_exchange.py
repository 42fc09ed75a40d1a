import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop

from server.gateway.exchange import HIGH_WATER, EngineGoneError, EngineSocket

OK = b"HTTP/1.1 200 OK\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def engine(folder: Path, handler: Handler) -> AsyncIterator[str]:
    socket = str(folder / "engine.sock")

    async def until_the_client_leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await handler(reader, writer)

    async with await asyncio.start_unix_server(until_the_client_leaves, socket):
        yield socket
        await asyncio.sleep(0.05)  # connections that were just closed go now


def saying(*parts: bytes) -> Handler:
    """An engine that reads the head, says these parts and closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    return handler


async def get(socket: str) -> tuple[int, dict[bytes, bytes], bytes]:
    with contextlib.closing(EngineSocket(socket)) as exchange:
        return await ask(exchange)


async def ask(exchange: EngineSocket) -> tuple[int, dict[bytes, bytes], bytes]:
    async with exchange("GET", b"/x?y", [(b"a", b"b")], b"") as answer:
        body = b"".join([chunk async for chunk in answer.chunks()])
        return answer.status, dict(answer.headers), body


@pytest.mark.parametrize(
    "parts",
    [
        (OK + b"Content-Length: 4\r\nX-A: b\r\n\r\nabcd",),
        (OK + b"content-length: 4\r\nx-a: b\r\n\r\na", b"bc", b"d"),
        (OK + b"transfer-encoding: chunked\r\nx-a: b\r\n\r\n2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"),
        (b"HTTP/1.1 200 O", b"K\r\nx-a: b\r\ntransfer-enc", b"oding: chunked\r\n\r\n4\r", b"\nabcd\r\n0\r\n\r\n"),
    ],
)
async def test_an_answer_is_the_same_however_it_is_cut(tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    async with engine(tmp_path, saying(*parts)) as socket:
        status, headers, body = await get(socket)
    assert (status, headers[b"x-a"], body) == (200, b"b", b"abcd")


class Repeating:
    """An engine that answers each request of a connection with `answers`, in turn; counts both."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self.connections = 0
        self.seen: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while not reader.at_eof():
            with contextlib.suppress(asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                self.seen.append(head + await reader.readexactly(length))
                writer.write(self._answers[(len(self.seen) - 1) % len(self._answers)])


async def test_the_request_is_sent_as_given(tmp_path: Path) -> None:
    handler = Repeating(OK + b"content-length: 0\r\n\r\n")
    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            async with exchange("POST", b"/v1/%C3%A9?q=1", [(b"x-a", b"\xe9")], b"12345") as answer:
                assert answer.status == 200
    fields = b"host: engine\r\ncontent-length: 5\r\nx-a: \xe9\r\n"
    assert handler.seen == [b"POST /v1/%C3%A9?q=1 HTTP/1.1\r\n" + fields + b"\r\n12345"]


async def test_a_request_larger_than_the_socket_s_buffer_arrives_whole(tmp_path: Path) -> None:
    handler = Repeating(OK + b"content-length: 0\r\n\r\n")
    body = bytes(range(256)) * 20_000
    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            for _ in range(2):
                async with exchange("POST", b"/", [], body) as answer:
                    assert answer.status == 200
    assert [request.endswith(b"\r\n\r\n" + body) for request in handler.seen] == [True, True]


async def test_requests_one_after_another_share_a_connection_and_none_sees_another_s_answer(tmp_path: Path) -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n2\r\ncd\r\n0\r\n\r\n"
    handler = Repeating(OK + b"content-length: 2\r\nx-a: 1\r\n\r\nab", OK + chunked)
    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            got = [await ask(exchange) for _ in range(4)]
    first = (200, {b"content-length": b"2", b"x-a": b"1"}, b"ab")
    assert got == [first, (200, {b"transfer-encoding": b"chunked"}, b"cd")] * 2
    assert handler.connections == 1


async def test_requests_at_once_share_no_connection(tmp_path: Path) -> None:
    handler = Repeating(OK + b"content-length: 2\r\n\r\nab")
    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            await asyncio.gather(*(ask(exchange) for _ in range(3)))
            assert handler.connections == 3
            await asyncio.gather(*(ask(exchange) for _ in range(3)))
            assert handler.connections == 3


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 2\r\nconnection: close\r\n\r\nab",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nab",
        OK + b"content-length: 2\r\n\r\nab" + OK + b"content-length: 4\r\n\r\nevil",
    ],
    ids=["close", "HTTP/1.0", "an answer to nothing"],
)
async def test_a_connection_that_does_not_last_or_says_more_is_not_used_again(tmp_path: Path, answer: bytes) -> None:
    handler = Repeating(answer)
    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            assert [(await ask(exchange))[2] for _ in range(2)] == [b"ab", b"ab"]
    assert handler.connections == 2


async def test_an_answer_to_nothing_that_comes_late_is_no_answer_to_the_next_request(tmp_path: Path) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: 2\r\n\r\nab")
        await asyncio.sleep(0.05)
        writer.write(OK + b"content-length: 4\r\n\r\nevil")
        await reader.read()

    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            for _ in range(2):
                assert (await ask(exchange))[2] == b"ab"
                await asyncio.sleep(0.2)


async def test_a_resting_connection_that_the_engine_closes_is_not_used_again(tmp_path: Path) -> None:
    async with engine(tmp_path, saying(OK + b"content-length: 2\r\n\r\nab")) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            for _ in range(3):
                assert (await ask(exchange))[2] == b"ab"
                await asyncio.sleep(0.1)


class Closing:
    """An engine that closes each connection some time after a whole response, and counts the requests that it has read.

    vLLM's server does so where something is raised after a response. The response does not announce it.
    """

    def __init__(self, status: bytes, delay: float | None) -> None:
        self._status = status
        self._delay = delay
        self.read = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.read += 1
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\nab" % self._status)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # what comes now stays unread
        if self._delay is not None:
            await asyncio.sleep(self._delay)


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"500 Internal Server Error"])
@pytest.mark.parametrize("delay", [None, 0, 0.001, 0.003])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_closed_just_as_a_request_is_put_on_it_costs_no_request(
    tmp_path: Path, status: bytes, delay: float | None, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    handler = Closing(status, delay)

    async def clients() -> None:
        async with engine(tmp_path, handler) as socket:
            with contextlib.closing(EngineSocket(socket)) as exchange:

                async def client(index: int) -> None:
                    for _ in range(25):
                        assert (await ask(exchange))[2] == b"ab"
                        await asyncio.sleep(0.0005 * index)

                await asyncio.gather(*map(client, range(4)))

    with ThreadPoolExecutor(1) as thread:  # pytest's own loop belongs to this one
        thread.submit(run, clients()).result()
    assert handler.read == 100, "a request was begun twice"


@pytest.mark.parametrize("body", [b"", b"x" * 2_000_000], ids=["small", "large"])
async def test_a_request_that_the_engine_has_read_is_not_asked_again(tmp_path: Path, body: bytes) -> None:
    seen = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(body))
            seen += 1
            if seen == 2:
                return
            writer.write(OK + b"content-length: 2\r\n\r\nab")

    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            async with exchange("POST", b"/", [], body) as answer:
                assert [chunk async for chunk in answer.chunks()] == [b"ab"]
            with pytest.raises(EngineGoneError, match="closed the connection"):
                async with exchange("POST", b"/", [], body):
                    pass
    assert seen == 2


async def test_a_request_on_its_way_to_an_engine_that_is_given_up_ends_at_once(tmp_path: Path) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with engine(tmp_path, handler) as socket:
        with contextlib.closing(EngineSocket(socket)) as exchange:
            asking = [asyncio.create_task(ask(exchange)) for _ in range(3)]
            await asyncio.sleep(0)  # they connect
            exchange.break_off("it hangs")
            await asyncio.sleep(0.05)
            late = asyncio.create_task(ask(exchange))
            await asyncio.sleep(0.05)
            exchange.break_off("it hangs")
            results = await asyncio.wait_for(asyncio.gather(*asking, late, return_exceptions=True), 10)
    assert [type(result) for result in results] == [EngineGoneError] * 4
    assert str(results[3]) == "it hangs"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "closed the connection"),
        ((OK,), "closed the connection"),
        ((b"nonsense\r\n\r\n",), "does not speak HTTP"),
        ((OK + b"content-length: 4\r\n\r\nab",), "closed the connection"),
        ((OK + b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n",), "closed the connection"),
        ((OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",), "does not speak HTTP"),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error_and_never_an_end(
    tmp_path: Path, parts: tuple[bytes, ...], reason: str
) -> None:
    async with engine(tmp_path, saying(*parts)) as socket:
        with pytest.raises(EngineGoneError, match=reason):
            await get(socket)


async def test_no_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineGoneError, match="cannot be reached: No such file"):
        await get(str(tmp_path / "none.sock"))


async def test_what_came_before_the_break_is_handed_over(tmp_path: Path) -> None:
    chunks = []
    async with engine(tmp_path, saying(OK + b"content-length: 9\r\n\r\nab", b"cd")) as socket:
        with pytest.raises(EngineGoneError):
            async with EngineSocket(socket)("GET", b"/", [], b"") as answer:
                async for chunk in answer.chunks():
                    chunks.append(chunk)  # noqa: PERF401 — those before the error count
    assert b"".join(chunks) == b"abcd"


@pytest.mark.parametrize("after_head", [False, True])
async def test_leaving_closes_the_connection(tmp_path: Path, after_head: bool) -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if after_head:
            writer.write(OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        closed.set()

    async with engine(tmp_path, handler) as socket:
        asking = asyncio.create_task(get(socket))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(closed.wait(), 10)


async def test_an_engine_waits_for_a_slow_client(tmp_path: Path) -> None:
    size = 40 * HIGH_WATER
    sent = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * HIGH_WATER)
            sent += HIGH_WATER
            await writer.drain()

    async with engine(tmp_path, handler) as socket, EngineSocket(socket)("GET", b"/", [], b"") as answer:
        await asyncio.sleep(0.2)
        assert sent < size, "all of it was taken in though nobody reads"
        assert sum([len(chunk) async for chunk in answer.chunks()]) == size
