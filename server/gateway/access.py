"""Around every request: an id, one line in the log (never a prompt), and the request metrics."""

import functools
import re
import time
import uuid
from collections.abc import Sequence

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from server.gateway.metrics import Metrics

_VALID_ID = re.compile(rb"[\w.:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Monitors ask for it every few seconds. A 503 there is an answer, not a failure.
_QUIET = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})


class AccessMiddleware:
    """Pure ASGI, so that it neither buffers a stream nor hides a client's going away.

    Puts `request_id` into `scope["state"]`. Reads `key` (the API key's name), `model` and the tokens there, where they
    are known. `outcome` is the status for the log and the metrics where it differs from the one sent. It does for a
    stream that broke off, and for a client that left. Behind a reverse proxy on an address among `trusted`, the client
    is whom X-Forwarded-For names.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, trusted: Sequence[str]) -> None:
        self._app = app
        self._forwarded: ASGIApp = ProxyHeadersMiddleware(app, list(trusted))  # type: ignore[arg-type, assignment]
        self._log = structlog.get_logger("voltserve.access").bind()
        # prometheus_client takes longer to find a series than to count in it.
        self._requests = functools.cache(metrics.requests.labels)
        self._duration = functools.cache(metrics.duration.labels)
        self._first_byte = functools.cache(metrics.first_byte.labels)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        app = self._app
        request_id = b""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _VALID_ID.fullmatch(value):
                request_id = value
            elif name == b"x-forwarded-for":
                app = self._forwarded
        request_id = request_id or uuid.uuid4().hex.encode("ascii")
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode("ascii")
        status = size = 0
        first_byte: float | None = None

        async def send_and_note(message: Message) -> None:
            nonlocal status, size, first_byte
            if message["type"] == "http.response.body":
                length = len(message.get("body", b""))
                if length and first_byte is None:
                    first_byte = time.perf_counter() - began
                size += length
            elif message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await app(scope, receive, send_and_note)
        finally:
            self._note(scope, state.get("outcome", status or 500), time.perf_counter() - began, first_byte, size)

    def _note(self, scope: Scope, status: int, elapsed: float, first_byte: float | None, size: int) -> None:
        # The route's template, not the path: clients choose paths, and each label value is a series.
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests(route, method, str(status)).inc()
        self._duration(route).observe(elapsed)
        if first_byte is not None:
            self._first_byte(route).observe(first_byte)
        (self._log.debug if route in _QUIET else self._log.info)(
            "request",
            request_id=scope["state"]["request_id"],
            client=(scope["client"] or ("?",))[0],
            key=scope["state"].get("key"),
            model=scope["state"].get("model"),
            method=method,
            path=scope["path"],
            status=status,
            bytes=size,
            seconds=round(elapsed, 4),
            first_byte=None if first_byte is None else round(first_byte, 4),
            prompt_tokens=scope["state"].get("prompt_tokens"),
            completion_tokens=scope["state"].get("completion_tokens"),
        )
