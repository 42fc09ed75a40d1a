import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from server.gateway.exchange import HIGH_WATER, EngineGoneError, exchange_over

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
    async with exchange_over(socket)("GET", b"/x?y", [(b"a", b"b")], b"") as answer:
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


async def test_the_request_is_sent_as_given_on_a_connection_of_its_own(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head + await reader.readexactly(5))
        writer.write(OK + b"content-length: 0\r\n\r\n")

    async with engine(tmp_path, handler) as socket:
        for _ in range(2):
            async with exchange_over(socket)("POST", b"/v1/%C3%A9?q=1", [(b"x-a", b"\xe9")], b"12345") as answer:
                assert answer.status == 200
    fields = b"host: engine\r\nconnection: close\r\ncontent-length: 5\r\nx-a: \xe9\r\n"
    assert seen == [b"POST /v1/%C3%A9?q=1 HTTP/1.1\r\n" + fields + b"\r\n12345"] * 2


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
            async with exchange_over(socket)("GET", b"/", [], b"") as answer:
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

    async with engine(tmp_path, handler) as socket, exchange_over(socket)("GET", b"/", [], b"") as answer:
        await asyncio.sleep(0.2)
        assert sent < size, "all of it was taken in though nobody reads"
        assert sum([len(chunk) async for chunk in answer.chunks()]) == size
