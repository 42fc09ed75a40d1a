"""Passes one request to the engine and its response back, chunk by chunk, and ends both sides together.

A client that goes away closes the request to the engine at once, before or after the first byte, which makes the engine
abort the sequence. An engine that goes away never looks like a normal end: it is a 502 before the first byte, an error
event at the end of an event stream, and a broken connection otherwise.
"""

import asyncio
import json
import time
from collections.abc import Callable
from math import ceil

import httpx
import structlog
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from server.gateway.errors import APIError
from server.gateway.metrics import Metrics
from server.gateway.routes import ProxiedRoute
from server.supervisor import State, Status

# Hop-by-hop fields (RFC 9110, 7.6.1), and those that each connection states for itself.
_PER_CONNECTION = frozenset(
    {
        *(
            "connection",
            "keep-alive",
            "proxy-authenticate",
            "proxy-authorization",
            "te",
            "trailer",
            "transfer-encoding",
        ),
        *("upgrade", "host", "content-length", "expect"),
    }
)
# A client's credentials are for the gateway.
_CREDENTIALS = frozenset({"authorization", "cookie"})
_ALREADY_SET = frozenset({"connection", "keep-alive", "transfer-encoding", "date", "server", "x-request-id"})

CLIENT_CLOSED = 499  # nginx's status for a request whose client went away; never sent, only logged and counted

log = structlog.get_logger("voltserve.gateway")


class InFlight:
    """Counts the requests at the engine, and tells when there are none."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._none.set()

    async def wait_for_none(self) -> None:
        """Returns when no request is at the engine."""
        await self._none.wait()


class Proxy:
    """An ASGI application for one proxied route."""

    def __init__(
        self,
        route: ProxiedRoute,
        client: httpx.AsyncClient,
        status: Callable[[], Status],
        max_body_bytes: int,
        in_flight: InFlight,
        metrics: Metrics,
    ) -> None:
        self._route = route
        self._client = client
        self._status = status
        self._max_body_bytes = max_body_bytes
        self._in_flight = in_flight
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            body = await read_body(Headers(scope=scope), receive, self._max_body_bytes)
            if body is None:
                self._client_left(scope)
                return
            if self._route.has_body:
                check_json_object(body)
            check_ready(self._status())
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        with self._in_flight:
            await self._relay_while_client_stays(scope, receive, send, body)

    async def _relay_while_client_stays(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        relay = asyncio.create_task(self._relay(scope, receive, send, body))
        left = asyncio.create_task(_disconnected(receive))
        try:
            done, _ = await asyncio.wait({relay, left}, return_when=asyncio.FIRST_COMPLETED)
            if relay not in done:
                self._client_left(scope)
                return
        finally:
            # Cancelling the relay closes its connection to the engine.
            for task in (relay, left):
                task.cancel()
            await asyncio.wait({relay, left})
        relay.result()

    def _client_left(self, scope: Scope) -> None:
        scope["state"]["outcome"] = CLIENT_CLOSED
        self._metrics.client_disconnects.labels(self._route.path).inc()

    async def _relay(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        request = self._client.build_request(
            self._route.method,
            engine_url(scope),
            headers=_request_headers(scope),
            content=body,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            await self._engine_gone(error).response()(scope, receive, send)
            return
        try:
            ended_well = await self._relay_response(response, scope, send)
        finally:
            await response.aclose()
        # Last of all: once the response is complete, the server reports the client as disconnected.
        if ended_well:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay_response(self, response: httpx.Response, scope: Scope, send: Send) -> bool:
        """Everything but the end. False where the connection must break instead of ending."""
        headers = [(name.lower(), value) for name, value in response.headers.raw if _passes_back(name)]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        at_event_end = True
        try:
            async for chunk in response.aiter_raw():
                at_event_end = chunk.endswith((b"\n\n", b"\r\n\r\n"))
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.TransportError as error:
            broken = self._engine_gone(error)
            log.warning("response broke off", request_id=scope["state"]["request_id"], error=broken.message)
            scope["state"]["outcome"] = broken.status
            # Half an event cannot be taken back, so a client that got one must see the connection break. Leaving
            # the response unfinished makes the server break it.
            if not (is_event_stream and at_event_end):
                return False
            await send({"type": "http.response.body", "body": broken.event(), "more_body": True})
        return True

    def _engine_gone(self, error: httpx.TransportError) -> APIError:
        status = self._status()
        state = "" if status.state is State.READY else f"; {status.explain()}"
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return APIError(502, "engine_unavailable", f"the engine broke off this request ({detail}){state}")


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes | None:
    """The whole request body; None if the client went away before its end.

    Raises:
        APIError: 413, as soon as more than `limit` bytes are announced or have come.
    """
    too_large = APIError(413, "request_too_large", f"the request body exceeds {limit} bytes (--max-body-bytes)")
    if int(headers.get("content-length", "0")) > limit:  # the HTTP parser has checked that it is a number
        raise too_large
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        more = message.get("more_body", False)
    return bytes(body)


def check_json_object(body: bytes) -> None:
    """Raises APIError 400 where `body` is not a JSON object in UTF-8."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise APIError(400, "invalid_json", f"the request body is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise APIError(400, "invalid_json", f"the request body must be a JSON object, not {type(value).__name__}")


def check_ready(status: Status) -> None:
    """Raises APIError 503, with Retry-After, where the engine takes no requests."""
    if status.state is State.READY:
        return
    seconds = 5 if status.retry_at is None else max(1, ceil(status.retry_at - time.monotonic()))
    code = "draining" if status.state is State.DRAINING else "engine_not_ready"
    raise APIError(503, code, status.explain(), {"Retry-After": str(seconds)})


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()


def engine_url(scope: Scope) -> httpx.URL:
    """The request's path and query at the engine, byte for byte."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return httpx.URL("http://engine").copy_with(raw_path=scope["raw_path"] + query)


def _request_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    listed = _listed_in_connection(scope["headers"])
    dropped = _PER_CONNECTION | _CREDENTIALS | listed | {"x-request-id"}
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in dropped]
    return [*headers, (b"x-request-id", scope["state"]["request_id"].encode("ascii"))]


def _listed_in_connection(headers: list[tuple[bytes, bytes]]) -> frozenset[str]:
    """Fields that `Connection` names are hop-by-hop too."""
    values = (value.decode("latin-1") for name, value in headers if name == b"connection")
    return frozenset(field.strip().lower() for value in values for field in value.split(","))


def _passes_back(name: bytes) -> bool:
    field = name.decode("latin-1").lower()
    return field not in _ALREADY_SET and field not in _PER_CONNECTION - {"content-length"}
