"""uvicorn as the gateway runs it, with what it lacks: bounds on a request's head, and on how slowly one may come."""

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.gateway.app import Gateway
from server.gateway.errors import APIError

# Bytes of request target and header fields, with four a field for what separates them. API keys and ids need a few
# hundred. Of a head that is not over yet twice as much is kept.
MAX_HEAD = 32 * 2**10
HEAD_TIMEOUT = 10.0  # seconds from a connection's, or a further request's, first byte to the end of the head

log = structlog.get_logger("voltserve.access")


def http_server(gateway: Gateway, body_timeout: float) -> uvicorn.Server:
    """The server for the gateway's application; its `serve(sockets=[…])` runs until `should_exit`.

    Args:
        gateway: answers the requests.
        body_timeout: seconds a request's body may take to come.
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


class _HeadTooLargeError(Exception):
    """Raised in a callback of the parser, which stops at it."""


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection. A request whose head is too large is refused with 431; one that comes too slowly with
    408, or, before its first byte, by closing.

    Each phase of a request has a time by which it must be over. A request that comes whole, as nearly all do, costs no
    timer beyond its connection's.
    """

    def __init__(self, *args: Any, body_timeout: float, on_refusal: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._body_timeout = body_timeout
        self._on_refusal = on_refusal
        self._in_head = True
        self._head_bytes = 0  # that have come of a head, while it is not over
        self._due: float | None = None  # when the present phase must be over; None: nothing is expected
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._due = self.loop.time() + HEAD_TIMEOUT
        self._timer = self.loop.call_at(self._due, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._due is None:
            self._due = self.loop.time() + HEAD_TIMEOUT
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD:
                self._refuse_head()
        if self._due is not None and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_at(self._due, self._look)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self._head_size() > MAX_HEAD:
            raise _HeadTooLargeError
        self._in_head = False
        self._disarm()
        self._due = self.loop.time() + self._body_timeout
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_head = True
        self._head_bytes = 0
        self._due = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where the parser has stopped."""
        if self._in_head and self.headers is not None and self._head_size() > MAX_HEAD:
            self._refuse_head()
        else:
            self._refuse(400, "invalid_http", "this is no HTTP/1.1 request")

    def _head_size(self) -> int:
        if not self.headers:
            return len(self.url)
        return len(self.url) + 4 * len(self.headers) + sum(map(len, itertools.chain.from_iterable(self.headers)))

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn for a request to change the protocol, which is answered like any other."""

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Acts on what did not come in time. Where it is we who do not read, or who still answer, it gets more time."""
        self._timer = None
        if self._due is None or self.transport.is_closing():
            return
        if self.flow.read_paused or (self._in_head and self._answering()):
            self._due = self.loop.time() + HEAD_TIMEOUT
        if self.loop.time() < self._due:
            self._timer = self.loop.call_at(self._due, self._look)
        elif not self._in_head and self._answering():
            message = f"the request body did not come within {self._body_timeout:g} s (--body-timeout)"
            self._refuse(408, "request_timeout", message)
        elif self._in_head and self._head_bytes:
            message = f"the request's header fields did not come within {HEAD_TIMEOUT:g} s"
            self._refuse(408, "request_timeout", message)
        else:
            self.transport.close()

    def _answering(self) -> bool:
        """Whether a request that came here waits for its response, or for the rest of it."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_head(self) -> None:
        message = f"the request's target and header fields exceed {MAX_HEAD} bytes"
        self._refuse(431, "headers_too_large", message)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers, unless that would be taken for the answer to an earlier request, and closes the connection."""
        if self.transport.is_closing():
            return
        log.info("request refused", client=(self.client or ("?",))[0], status=status, code=code)
        self._on_refusal(code)
        own = self._answering() and not self._in_head and not self.cycle.response_started
        if own:
            self.cycle.scope["state"]["outcome"] = status
        if own or not self._answering():
            body = json.dumps(APIError(status, code, message).body(), ensure_ascii=False).encode("utf-8")
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
