"""uvicorn as the gateway runs it, with bounds on a request's head and on the time that a request takes to arrive."""

import asyncio
import contextlib
import enum
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import structlog
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.gateway.app import Gateway
from server.gateway.errors import APIError

# Bytes of request target and header fields, plus four per field for separators. API keys and ids need a few hundred. An
# unfinished head may take twice as much, besides the read that it began in.
MAX_HEAD = 32 * 2**10
HEAD_TIMEOUT = 10.0  # seconds from the first byte of a connection, or of a further request, to the end of the head
LINGER = 2.0  # seconds for a client that still sends to read why it was refused (RFC 9112, 9.6)
# Limits per connection of requests that wait behind the one being answered. Beyond them, reading stops.
MAX_WAITING_REQUESTS = 32
MAX_WAITING_BYTES = 2**20

# uri-host [":" port] (RFC 9110, 7.2; RFC 3986, 3.2.2), or nothing.
_HOST = re.compile(rb"(?:\[[\w.:~!$&'()*+,;=%-]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")

log = structlog.get_logger("voltserve.access")


def http_server(gateway: Gateway, body_timeout: float) -> uvicorn.Server:
    """The server for the gateway's application; its `serve(sockets=[…])` runs until `should_exit`.

    Args:
        gateway: answers the requests.
        body_timeout: seconds within which a request's body must arrive.
    """
    refused = gateway.metrics.refused
    protocol = functools.partial(
        BoundedProtocol, body_timeout=body_timeout, on_refusal=lambda code: refused.labels(code).inc()
    )
    return _Server(
        uvicorn.Config(
            gateway.app,
            http=protocol,  # type: ignore[arg-type]  # called like the class, whose further arguments are bound
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # AccessMiddleware reads them
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: what a signal does is decided elsewhere."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook for signal handlers."""
        yield


class _Flow(FlowControl):
    """uvicorn's flow control. While `held`, a request's `receive` does not resume reading."""

    held = False

    def resume_reading(self) -> None:
        """Called by uvicorn, and at each `receive`."""
        if not self.held:
            super().resume_reading()


class _Phase(enum.Enum):
    """Where in a request the next byte belongs."""

    BETWEEN = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection. A request whose head is too large is refused with 431. A request that arrives too slowly
    is refused with 408; before its first byte, the connection is just closed.

    Each phase of a request has a deadline. Nearly all requests arrive in one piece and need no timer beyond their
    connection's. Requests, refused ones included, are answered in order of arrival.
    """

    def __init__(self, *args: Any, body_timeout: float, on_refusal: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._body_timeout = body_timeout
        self._on_refusal = on_refusal
        self._phase = _Phase.BETWEEN
        # Bytes of one head, chunk-size line, or trailer. Only reads that hold nothing else count: the parser does not
        # say how other reads divide.
        self._unfinished = 0
        self._progressed = False  # whether the present read began or ended any of those, or held a part of a body
        self._repeated_head = b""  # the head of an upgrade request, without its upgrade field
        self._deadline: float | None = None  # deadline of the present phase; None: nothing is expected
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = (
            None  # the request being answered; `cycle` is the last that arrived
        )
        self._refusal: bytes | None = None  # the last response of this connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._deadline = self.loop.time() + HEAD_TIMEOUT
        self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop. uvicorn notifies the last request that arrived; the one being answered is notified
        here.
        """
        self._cancel_timer()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._refusal is not None:
            return  # read only so that the client gets to read its answer
        self._unset_keepalive_if_required()
        if self._deadline is None:
            self._deadline = self.loop.time() + HEAD_TIMEOUT
        self._progressed = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            found = error.__context__  # what a callback raised
            self._refuse(found if isinstance(found, APIError) else _invalid("this is no HTTP/1.1 request"))
            return
        if not self._progressed:
            self._unfinished += len(data)
            if self._unfinished > 2 * MAX_HEAD:
                self._refuse(_head_too_large())
                return
        if self.pipeline:
            self._pause_when_full()
        if self._deadline is not None and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def _feed(self, data: bytes) -> None:
        """Parses, as if no request asked for an upgrade (RFC 9110, 7.8: a server may ignore that).

        The parser stops after the head of an upgrade request, and would take its body for the other protocol. So a new
        parser gets the head again, without the upgrade field.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                self.parser = httptools.HttpRequestParser(self)
                data = self._repeated_head + data[stop.args[0] :]
                self._repeated_head = b""
            else:
                return

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._progressed = True
        self._unfinished = 0
        if self._deadline is None:
            self._deadline = self.loop.time() + HEAD_TIMEOUT

    def on_headers_complete(self) -> None:
        """Called by the parser, which ends with what is raised here."""
        if self._head_size() > MAX_HEAD:
            raise _head_too_large()
        self._progressed = True
        self._unfinished = 0
        version = self.parser.get_http_version()
        if self.parser.should_upgrade():
            self._repeated_head = self._head_without_upgrade(version)
            return
        _check_host(self.headers, version)
        self._phase = _Phase.BODY
        self._cancel_timer()
        self._deadline = self.loop.time() + self._body_timeout
        super().on_headers_complete()
        if not self.parser.should_keep_alive():  # uvicorn misses `close` in a list, or in capitals
            self.cycle.keep_alive = False
        self.headers = []  # collects trailers, which nobody reads: they are no header fields

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._progressed = True
        self._unfinished = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Called by the parser."""
        self._progressed = True
        self._unfinished = 0

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._progressed = True
        self._unfinished = 0
        if self._repeated_head:
            return
        self._phase = _Phase.BETWEEN
        self._deadline = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by the request that was answered."""
        self.flow.held = False  # type: ignore[attr-defined]  # ours, see connection_made
        super().on_response_complete()
        if self.pipeline:
            self._pause_when_full()
        if self._refusal is not None and not self.transport.is_closing():
            self._refuse_in_turn()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _pause_when_full(self) -> None:
        """Stops reading while many requests wait: a connection's requests are answered one after another."""
        waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) >= MAX_WAITING_REQUESTS or waiting > MAX_WAITING_BYTES:
            self.flow.pause_reading()
            self.flow.held = True  # type: ignore[attr-defined]

    def _head_size(self) -> int:
        if not self.headers:
            return len(self.url)
        return len(self.url) + 4 * len(self.headers) + sum(map(len, itertools.chain.from_iterable(self.headers)))

    def _head_without_upgrade(self, version: str) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            message = "CONNECT is not allowed: it is for proxies, and this server is none; ask it directly"
            raise APIError(405, "method_not_allowed", message, {"Allow": ""})
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version.encode(), b"".join(fields))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        """Acts where the deadline has passed. The deadline moves while reading is paused, or while an answer is under
        way.
        """
        self._timer = None
        if self._deadline is None or self.transport.is_closing():
            return
        in_body = self._phase is _Phase.BODY
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and not in_body):
            self._deadline = self.loop.time() + HEAD_TIMEOUT
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        elif in_body and answering:
            message = f"the request body did not come within {self._body_timeout:g} s (--body-timeout)"
            self._refuse(APIError(408, "request_timeout", message))
        elif self._phase is _Phase.HEAD:
            message = f"the request's header fields did not come within {HEAD_TIMEOUT:g} s"
            self._refuse(APIError(408, "request_timeout", message))
        else:
            self.transport.close()

    def _refuse(self, error: APIError) -> None:
        """Answers the present request with an error and closes the connection, once earlier requests are answered."""
        if self.transport.is_closing():
            return
        log.info("request refused", client=(self.client or ("?",))[0], status=error.status, code=error.code)
        self._on_refusal(error.code)
        self._cancel_timer()
        if self._phase is _Phase.BODY:
            cycle = self.cycle
            if cycle.response_started:  # a request has one response only
                self.transport.close()
                return
            cycle.scope["state"]["outcome"] = error.status
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
        body = json.dumps(error.body(), ensure_ascii=False).encode("utf-8")
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()).encode("latin-1")
        self._refusal = STATUS_LINE[error.status] + head + b"\r\n" + body
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        running = self._running
        if running is not None and not running.response_complete and not running.disconnected:
            return
        self.transport.write(self._refusal or b"")
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER, self.transport.close)


def _invalid(what: str) -> APIError:
    return APIError(400, "invalid_http", what)


def _head_too_large() -> APIError:
    return APIError(431, "headers_too_large", f"the request's target and header fields exceed {MAX_HEAD} bytes")


def _check_host(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Raises APIError 400 where a request does not say, once and soundly, whom it is for (RFC 9112, 3.2)."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise _invalid(f"expected one header field Host, got {len(hosts)}")
    if not hosts:
        if version != "1.0":
            raise _invalid("the header field Host is missing, which HTTP/1.1 asks for")
    elif not _HOST.fullmatch(hosts[0]):
        raise _invalid("the header field Host is no host name or address, with or without a port")
