"""A replica's listener on the network. Peers that know the secret reach the engine's Unix socket, or receive its
status.

Every token of every stream passes through it, so bytes are forwarded unread, as they arrive.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from server.cluster.link import MAX_GREETING, MAX_LINE, PULSE, line, purpose_of
from server.errors import PreflightError

GREETING_LIMIT = 5.0  # seconds within which a connection must state its purpose
SETTLE = 1.0  # seconds in which requests may still arrive that gateways sent before they learned of the drain

log = structlog.get_logger("voltserve.relay")


class Relay:
    """Listens for gateways. `loads` has each gateway's last report: its requests for this replica.

    Args:
        secret: what a connection must know.
        engine: the engine's socket.
        introduce: makes the first messages to a gateway.
        pulse: makes the message of every second.
    """

    def __init__(
        self,
        secret: str,
        engine: Path,
        introduce: Callable[[], list[dict[str, Any]]],
        pulse: Callable[[], dict[str, Any]],
    ) -> None:
        self.secret = secret
        self.engine = engine
        self.introduce = introduce
        self.loads: dict[_Listener, float] = {}
        self._pulse = pulse
        self.splices: set[_Side] = set()
        self._unjoined = asyncio.Event()

    async def listen(self, host: str, ports: tuple[int, int] | None) -> asyncio.Server:
        """Takes connections at `host`, at the first free one of `ports`, or at any.

        Raises:
            PreflightError: no port can be had.
        """
        loop = asyncio.get_running_loop()
        problem: OSError | None = None
        for port in range(ports[0], ports[1] + 1) if ports else (0,):
            try:
                return await loop.create_server(lambda: _NewConnection(self), host, port)
            except OSError as error:
                problem = error
        where = f"any of the ports {ports[0]} to {ports[1]}" if ports else "any port"
        raise PreflightError(f"the replica cannot listen at {host}, at {where}: {problem}") from problem

    async def run(self) -> None:
        """Sends every gateway a pulse, every second."""
        while True:
            self.send_to_all(self._pulse())
            await asyncio.sleep(PULSE)

    def send_to_all(self, message: dict[str, Any]) -> None:
        """Sends a message to every gateway."""
        text = line(**message)
        for listener in tuple(self.loads):
            listener.send(text)

    async def wait_for_none(self, limit: float) -> int:
        """Waits until no connection to the engine is left, at most `limit` seconds. Returns how many are left.

        Gateways close their idle connections when a drain begins, so the remaining ones are requests.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit
        await asyncio.sleep(min(SETTLE, limit))
        while self.splices and loop.time() < deadline:
            self._unjoined.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._unjoined.wait(), deadline - loop.time())
        return len(self.splices)

    async def splice(self, transport: asyncio.Transport, first: bytes) -> None:
        """Joins a connection with a new one to the engine. `first`: the bytes received on it so far."""
        outer = _Side(transport, self._part)
        try:
            _, inner = await asyncio.get_running_loop().create_unix_connection(
                lambda: _Side(None, None), str(self.engine)
            )
        except OSError as error:
            log.warning("the engine takes no connection", error=str(error))
            transport.close()
            return
        outer.join(inner)
        if transport.is_closing():  # it went while the engine was asked
            inner.close()
            return
        transport.set_protocol(outer)
        self.splices.add(outer)
        if first:
            inner.write(first)
        transport.resume_reading()

    def _part(self, side: "_Side") -> None:
        self.splices.discard(side)
        self._unjoined.set()


class _NewConnection(asyncio.Protocol):
    """A connection whose purpose is not known yet."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._received = b""
        self._transport: Any = None
        self._limit = asyncio.get_running_loop().call_later(GREETING_LIMIT, self._refuse, "no greeting came")
        self._joining: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._limit.cancel()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._received += data
        first, end, rest = self._received.partition(b"\n")
        if not end:
            if len(first) > MAX_GREETING:
                self._refuse("its greeting does not end")
            return
        self._limit.cancel()
        purpose = purpose_of(first, self._relay.secret)
        if purpose == "engine":
            self._transport.pause_reading()
            self._joining = asyncio.get_running_loop().create_task(self._relay.splice(self._transport, rest))
        elif purpose == "status":
            listener = _Listener(self._relay, self._transport)
            self._transport.set_protocol(listener)
            for message in self._relay.introduce():
                listener.send(line(**message))
            listener.data_received(rest)
        else:
            self._refuse("it is no gateway, or has not the secret")

    def _refuse(self, why: str) -> None:
        peer = self._transport.get_extra_info("peername")
        log.warning("connection refused", peer=str(peer[0]) if peer else "?", reason=why)
        self._transport.abort()


class _Side(asyncio.Protocol):
    """One end of two joined connections. It forwards its data to the other end, no faster than that can send.

    Args:
        transport: the connection, where it is there already.
        on_end: called when it has ended.
    """

    def __init__(self, transport: Any, on_end: "Callable[[_Side], None] | None") -> None:
        self._transport = transport
        self._on_end = on_end
        self._other: _Side | None = None

    def join(self, other: "_Side") -> None:
        """Makes two ends one connection."""
        self._other, other._other = other, self

    def write(self, data: bytes) -> None:
        """Sends."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Closes, once what was written has gone out."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._other is not None:
            self._other.write(data)

    def pause_writing(self) -> None:
        """Called by the event loop."""
        if self._other is not None and not self._other._transport.is_closing():
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        """Called by the event loop."""
        if self._other is not None and not self._other._transport.is_closing():
            self._other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        if self._on_end is not None:
            self._on_end(self)
        if self._other is not None:
            self._other.close()


class _Listener(asyncio.Protocol):
    """A gateway's status connection."""

    def __init__(self, relay: Relay, transport: asyncio.Transport) -> None:
        self._relay = relay
        self._transport = transport
        self._received = b""
        relay.loads[self] = 0.0

    def send(self, text: bytes) -> None:
        """Sends, unless the gateway has not read for so long that it counts as gone."""
        if self._transport.get_write_buffer_size() > MAX_LINE:
            self._transport.abort()
        elif not self._transport.is_closing():
            self._transport.write(text)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        *lines, self._received = (self._received + data).split(b"\n")
        for text in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._relay.loads[self] = float(json.loads(text)["load"])
        if len(self._received) > MAX_LINE:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._relay.loads.pop(self, None)
