"""One HTTP request to an engine over its Unix socket, as lean as it can be: every token of every stream passes here.

A general client costs several times as much a request and a chunk (docs/log.md has the figures). Each request has a
connection of its own: closing it cancels exactly that request, and none meets one that the engine is about to close.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import httptools

HIGH_WATER = 2**18  # bytes of a response that wait for a slow client before the engine is made to wait
Headers = list[tuple[bytes, bytes]]


class EngineGoneError(Exception):
    """The engine broke off a request, or cannot be reached."""


class Answer(Protocol):
    """An engine's response whose head has come."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises EngineGoneError where it breaks off."""


# Method, target and header fields (without those of the connection) and the body.
Exchange = Callable[[str, bytes, Headers, bytes], "contextlib.AbstractAsyncContextManager[Answer]"]


def exchange_over(socket: str) -> Exchange:
    """Exchanges with the engine that listens at `socket`.

    Entering one raises EngineGoneError where no response comes; leaving it closes the connection in any case.
    """

    @contextlib.asynccontextmanager
    async def exchange(method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        loop = asyncio.get_running_loop()
        try:
            transport, answer = await loop.create_unix_connection(_Connection, socket)
        except OSError as error:
            raise EngineGoneError(f"it cannot be reached: {error.strerror or error}") from error
        try:
            transport.write(_head(method, target, headers, len(body)) + body)
            await answer.head
            yield answer
        finally:
            transport.abort()

    return exchange


def _head(method: str, target: bytes, headers: Headers, length: int) -> bytes:
    fields = b"".join(b"%b: %b\r\n" % field for field in headers)
    start = b"%b %b HTTP/1.1\r\n" % (method.encode("ascii"), target)
    return b"%bhost: engine\r\nconnection: close\r\ncontent-length: %d\r\n%b\r\n" % (start, length, fields)


class _Connection(asyncio.Protocol):
    """An `Answer`, fed by the event loop and by httptools' parser."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._parts: list[bytes] = []
        self._waiting = 0
        self._paused = False
        self._complete = False
        self._error: EngineGoneError | None = None
        self._news = asyncio.Event()

    async def chunks(self) -> AsyncIterator[bytes]:
        """What has come since the last chunk, as one."""
        while True:
            if self._parts:
                chunk = b"".join(self._parts)
                self._parts.clear()
                self._waiting = 0
                if self._paused:
                    self._paused = False
                    self._transport.resume_reading()
                yield chunk
            elif self._complete:
                return
            elif self._error is not None:
                raise self._error
            else:
                self._news.clear()
                await self._news.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"it does not speak HTTP: {error}")
            self._transport.abort()
        if self._waiting > HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._fail(str(error) if error else "it closed the connection before the end")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()
        if not self.head.done():
            self.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._parts.append(body)
        self._waiting += len(body)
        self._news.set()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._complete = True
        self._news.set()

    def _fail(self, reason: str) -> None:
        if self._complete or self._error is not None:
            return
        self._error = EngineGoneError(reason)
        if not self.head.done():
            self.head.set_exception(self._error)
        self._news.set()
