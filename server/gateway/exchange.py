"""A lean HTTP client for an engine's socket: every token of every stream passes through it.

A general client costs several times as much per request and per chunk (docs/log.md has the figures). Requests never
share a connection at a time, so closing one cancels exactly one request. A connection is reused only after a complete
response that is no error.

The engine is configured never to close an idle connection (server/config/render.py). Yet its server closes one after a
response if an exception was raised meanwhile. A request sent at that moment is repeated on a new connection, if the
engine cannot have begun it. The sign is a reset: the kernel sends one exactly when the owner closes a connection with
unread bytes.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import httptools

LAST_WORDS = 0.1  # seconds in which a failed engine's last output is still read
CONNECT_LIMIT = 3.0  # seconds within which another machine must accept a connection
HIGH_WATER = 2**18  # bytes that may wait for a slow client before reading from the engine pauses
Headers = list[tuple[bytes, bytes]]


class EngineGoneError(Exception):
    """The engine broke off a request, or cannot be reached."""


class _UnreadError(EngineGoneError):
    """The engine had closed the connection before it read all of the request."""


class Answer(Protocol):
    """An engine's response, once its head has arrived."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineGoneError where it breaks off."""


# Method, target and header fields (without those of the connection) and the body.
Exchange = Callable[[str, bytes, Headers, bytes], "contextlib.AbstractAsyncContextManager[Answer]"]


class EngineSocket:
    """An `Exchange` with the engine that listens at a Unix socket's `path`.

    Entering raises EngineGoneError where no response arrives. Leaving before the response's end closes its connection.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._retired = False
        self._breaks = 0

    @contextlib.asynccontextmanager
    async def __call__(self, method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        """One request."""
        connection = await self._asked(_head(method, target, headers, len(body)) + body)
        try:
            yield connection
        finally:
            self._end(connection)

    async def _asked(self, request: bytes) -> "_Connection":
        """Sends a request; returns the connection once the response's head has arrived."""
        if self._idle:
            with contextlib.suppress(_UnreadError):
                return await self._ask(self._idle.pop(), request)
        return await self._ask(await self._connect(), request)

    async def _ask(self, connection: "_Connection", request: bytes) -> "_Connection":
        self._busy.add(connection)
        try:
            await connection.ask(request)
        except BaseException:
            self._end(connection)
            raise
        return connection

    def _end(self, connection: "_Connection") -> None:
        self._busy.remove(connection)
        if self._retired:
            connection.close()
        else:
            connection.rest_or_close()

    def retire(self) -> None:
        """From now on no connection is kept idle, so that the engine's side sees which requests are left."""
        self._retired = True
        self.close()

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in tuple(self._idle):
            connection.close()

    def break_off(self, reason: str) -> None:
        """Ends every request under way with EngineGoneError, and closes all connections."""
        self._breaks += 1
        for connection in tuple(self._busy):
            connection.fail(reason)
        self.close()

    def break_off_soon(self, reason: str) -> None:
        """The same, once the engine's earlier output has been read."""
        asyncio.get_running_loop().call_later(LAST_WORDS, self.break_off, reason)

    async def _connect(self) -> "_Connection":
        breaks = self._breaks
        try:
            connection = await self._open(lambda: _Connection(self._idle))
        except OSError as error:
            raise EngineGoneError(f"it cannot be reached: {error.strerror or error}") from error
        if breaks != self._breaks:
            connection.close()
            raise EngineGoneError("it was given up")
        return connection

    async def _open(self, new: "Callable[[], _Connection]") -> "_Connection":
        """A connection that is ready for requests. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_unix_connection(new, self._path)
        return connection


class RemoteEngineSocket(EngineSocket):
    """An `Exchange` with an engine on another machine, whose relay wants `greeting` first (server/cluster/relay.py)."""

    def __init__(self, host: str, port: int, greeting: bytes) -> None:
        super().__init__(f"{host}:{port}")
        self._host = host
        self._port = port
        self._greeting = greeting

    async def _open(self, new: "Callable[[], _Connection]") -> "_Connection":
        opening = asyncio.get_running_loop().create_connection(new, self._host, self._port)
        try:
            _, connection = await asyncio.wait_for(opening, CONNECT_LIMIT)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"no connection to {self._path} within {CONNECT_LIMIT:g} s") from error
        connection.greet(self._greeting)
        return connection


def _head(method: str, target: bytes, headers: Headers, length: int) -> bytes:
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    return b"%b %b HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n%b\r\n" % (method.encode(), target, length, fields)


class _Connection(asyncio.Protocol):
    """A connection and its present `Answer`, fed by the event loop and by httptools' parser.

    Args:
        idle: the idle connections. This one adds itself after a response, and removes itself when it closes.
    """

    def __init__(self, idle: "list[_Connection]") -> None:
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self._asked = False
        self._arrived: asyncio.Future[None] | None = None  # `ask` waits for it, and then `chunks`
        self._parts: list[bytes] = []
        self._waiting = 0
        self._paused = False
        self._begun = False
        self._complete = False
        self._may_rest = False
        self._error: EngineGoneError | None = None

    async def ask(self, request: bytes) -> None:
        """Sends a request and returns once the response's head has arrived."""
        self._asked = True
        self._send(request)
        while not self.status:
            await self._wait_for_data()

    def _send(self, request: bytes) -> None:
        """Writes at once. uvloop's transport would wait until every ready task has run. Of requests that arrive
        together, the first would then leave only with the last.
        """
        sent = 0
        try:
            sent = os.write(self._transport.get_extra_info("socket").fileno(), request)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(f"it cannot be written to: {error.strerror}", error)
        if sent < len(request):
            self._transport.write(memoryview(request)[sent:])

    def greet(self, greeting: bytes) -> None:
        """Sends the greeting before a connection's first request."""
        self._send(greeting)

    def fail(self, reason: str) -> None:
        """Ends the request with an error, as if the engine had disconnected."""
        self._fail(reason)
        self.close()

    def rest_or_close(self) -> None:
        """Ends the request. The connection stays open if the response is complete and the engine keeps it open. After
        an error vLLM's server often closes it without saying so.
        """
        if not self._may_rest or self.status >= 400 or self._transport.is_closing():
            self.close()
            return
        if self._paused:
            self._transport.resume_reading()
        self._begin()
        self._idle.append(self)

    def close(self) -> None:
        """Closes it at once, and keeps it from being used again."""
        self._transport.abort()
        if self in self._idle:
            self._idle.remove(self)

    async def _wait_for_data(self) -> None:
        if self._error is not None:
            raise self._error
        self._arrived = self._loop.create_future()
        await self._arrived

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Everything that arrived since the last chunk, as one chunk."""
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
            else:
                await self._wait_for_data()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if not self._asked:  # otherwise it would be taken for the next request's answer
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"it does not speak HTTP: {error}")
            self.close()
        if self._waiting > HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self.close()
        self._fail(str(error) if error else "it closed the connection before the end", error)

    def on_message_begin(self) -> None:
        """Called by the parser, which takes the error for one of its own."""
        if self._complete:
            raise EngineGoneError("it answers more than it was asked")
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()
        self._wake()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._parts.append(body)
        self._waiting += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._complete = True
        self._may_rest = self._parser.should_keep_alive()
        self._wake()

    def _fail(self, reason: str, cause: Exception | None = None) -> None:
        if not self._complete and self._error is None:
            unread = isinstance(cause, ConnectionError) and not self._begun
            self._error = (_UnreadError if unread else EngineGoneError)(reason)
            self._wake()
