"""Around every request: an id, one line in the log (never a prompt), and the request metrics."""

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.gateway.metrics import Metrics

_VALID_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

log = structlog.get_logger("voltserve.access")


class AccessMiddleware:
    """Pure ASGI, so that it neither buffers a stream nor hides a client's going away.

    Puts `request_id` into `scope["state"]`. Reads there `key`, the name of the API key, and `outcome`, the status that
    the log and the metrics show where it is not the one sent (a stream that broke off, a client that left).
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        sent = {"status": 0, "bytes": 0}
        first_byte: list[float] = []

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif message["type"] == "http.response.body":
                if message.get("body") and not first_byte:
                    first_byte.append(time.perf_counter() - began)
                sent["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._note(scope, state.get("outcome", sent["status"] or 500), began, first_byte, sent["bytes"])

    def _note(self, scope: Scope, status: int, began: float, first_byte: list[float], size: int) -> None:
        # The route's template, not the path: clients choose paths, and each label value is a series.
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        elapsed = time.perf_counter() - began
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.duration.labels(route).observe(elapsed)
        if first_byte:
            self._metrics.first_byte.labels(route).observe(first_byte[0])
        (log.debug if route in _QUIET else log.info)(
            "request",
            request_id=scope["state"]["request_id"],
            client=(scope["client"] or ("?",))[0],
            key=scope["state"].get("key"),
            method=method,
            path=scope["path"],
            status=status,
            bytes=size,
            seconds=round(elapsed, 4),
            first_byte=round(first_byte[0], 4) if first_byte else None,
        )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Asked every few seconds by whoever watches; a 503 there is an answer, not a failure.
_QUIET = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
