"""What passes a relay, seen at its two ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from server.cluster import relay as module
from server.cluster.link import MAX_GREETING, greeting
from server.cluster.relay import Relay
from tests.server.cluster.nodes import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def relaying(
    folder: Path, engine: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[tuple[Relay, Callable[[bytes], Awaitable[Streams]]]]:
    """A relay before `engine`, and a way to connect to it."""
    socket = folder / "engine.sock"
    under_way: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way.add(asyncio.current_task())  # type: ignore[arg-type]  # there is one
        await engine(reader, writer)

    behind = await asyncio.start_unix_server(answer, str(socket))
    relay = Relay("right", socket, introduce=lambda: [{"hello": 1}], pulse=lambda: {"pulse": 1})
    listening = await relay.listen("127.0.0.1", None)
    made: list[asyncio.StreamWriter] = []

    async def connect(first: bytes) -> Streams:
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname()[:2])
        made.append(writer)
        writer.write(first)
        return reader, writer

    try:
        yield relay, connect
    finally:
        for writer in made:
            writer.transport.abort()
        if under_way:
            await asyncio.wait(under_way, timeout=10)
        listening.close()
        behind.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("split", [0, 1, 10, 30])
async def test_bytes_pass_as_they_are_however_the_greeting_is_cut(tmp_path: Path, split: int) -> None:
    async with relaying(tmp_path, echo) as (_, connect):
        text = greeting("right", "engine") + b"request\n"
        reader, writer = await connect(text[:split])
        await asyncio.sleep(0.05)
        writer.write(text[split:])
        assert await reader.readline() == b"request\n"
        big = bytes(range(256)) * 40_000
        sending = asyncio.create_task(_send(writer, big))
        assert await reader.readexactly(len(big)) == big
        await sending


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def test_a_slow_reader_makes_the_engine_wait(tmp_path: Path) -> None:
    written = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(2**16))
                await writer.drain()
                written += 2**16

    async with relaying(tmp_path, flood) as (relay, connect):
        _, writer = await connect(greeting("right", "engine"))
        await asyncio.sleep(0.5)
        before = written
        await asyncio.sleep(0.5)
        assert written == before < 2**26
        writer.transport.abort()
        await until(lambda: not relay.splices, "the engine's end is closed too")


async def test_when_one_end_goes_the_other_goes(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline() == b"end\n":
            writer.write(b"last words")
            writer.close()
            return
        await reader.read()
        gone.set()
        writer.close()

    async with relaying(tmp_path, once) as (_, connect):
        reader, _writer = await connect(greeting("right", "engine") + b"end\n")
        assert await reader.read() == b"last words"
        _, writer = await connect(greeting("right", "engine") + b"stay\n")
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.wait_for(gone.wait(), 10)


@pytest.mark.parametrize(
    "first", [greeting("wrong", "engine"), b"GET / HTTP/1.1\r\n", bytes(MAX_GREETING + 1), b"\xff\xfe\n"]
)
async def test_strangers_are_turned_away(tmp_path: Path, first: bytes) -> None:
    async with relaying(tmp_path, echo) as (relay, connect):
        reader, _ = await connect(first)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        assert not relay.splices


async def test_whoever_says_nothing_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREETING_LIMIT", 0.1)
    async with relaying(tmp_path, echo) as (_, connect):
        reader, _ = await connect(b"volt")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_a_gateway_hears_and_is_heard(tmp_path: Path) -> None:
    async with relaying(tmp_path, echo) as (relay, connect):
        reader, writer = await connect(greeting("right", "status") + b'{"load":2}\n{"lo')
        assert await reader.readline() == b'{"hello":1}\n'
        relay.send_to_all({"status": "s"})
        assert await reader.readline() == b'{"status":"s"}\n'
        assert list(relay.loads.values()) == [2.0]
        writer.write(b'ad":5}\nnonsense\n[1]\n{"load":"x"}\n')
        await asyncio.sleep(0.1)
        assert list(relay.loads.values()) == [5.0]
        writer.close()
        await asyncio.sleep(0.1)
        assert not relay.loads


async def test_a_drain_waits_for_requests_and_not_for_gateways(tmp_path: Path) -> None:
    async with relaying(tmp_path, echo) as (relay, connect):
        await connect(greeting("right", "status"))
        assert await relay.wait_for_none(5.0) == 0
        _, writer = await connect(greeting("right", "engine") + b"x")
        await asyncio.sleep(0.1)
        assert await relay.wait_for_none(0.2) == 1
        waiting = asyncio.create_task(relay.wait_for_none(30.0))
        writer.close()
        assert await asyncio.wait_for(waiting, 10) == 0


async def test_an_engine_that_is_not_there_ends_the_connection(tmp_path: Path) -> None:
    async with relaying(tmp_path, echo) as (relay, connect):
        relay.engine = tmp_path / "nowhere"
        reader, _ = await connect(greeting("right", "engine") + b"x")
        assert await asyncio.wait_for(reader.read(), 10) == b""
