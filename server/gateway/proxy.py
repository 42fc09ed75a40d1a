"""Passes one request to the engine and its response back, chunk by chunk, and ends both sides together.

A client that goes away closes the request to the engine at once, before or after the first byte, which makes the engine
abort the sequence. An engine that goes away never looks like a normal end: it is a 502 before the first byte, an error
event at the end of an event stream, and a broken connection otherwise.
"""

import asyncio

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.gateway import mend
from server.gateway.errors import APIError
from server.gateway.exchange import Answer, EngineGoneError
from server.gateway.guard import Guard, parse_object
from server.gateway.metrics import Metrics
from server.gateway.pool import Pool, Upstream
from server.gateway.routes import ProxiedRoute
from server.supervisor import State

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

    def __init__(self, route: ProxiedRoute, pool: Pool, guard: Guard, in_flight: InFlight, metrics: Metrics) -> None:
        self._route = route
        self._pool = pool
        self._guard = guard
        self._in_flight = in_flight
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            with self._guard.limits.counted(self._guard.client(scope)):
                await self._answer(scope, receive, send)
        except APIError as error:
            self._metrics.refused.labels(error.code).inc()
            await error.response()(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._guard.body(scope, receive)
        if body is None:
            self._client_left(scope)
            return
        model = None
        if self._route.has_body:
            request = parse_object(body)
            self._guard.check_size(request)
            model = request.get("model")
            body = mend.request_body(self._route.path, request, body)
        relay = asyncio.create_task(self._relay(scope, receive, send, body, model))
        left = asyncio.create_task(_disconnected(receive))
        try:
            done, _ = await asyncio.wait({relay, left}, return_when=asyncio.FIRST_COMPLETED)
            if relay not in done:
                self._client_left(scope)
                return
        finally:
            # Cancelling the relay leaves the queue, or closes its connection to the engine.
            for task in (relay, left):
                task.cancel()
            await asyncio.wait({relay, left})
        relay.result()

    def _client_left(self, scope: Scope) -> None:
        scope["state"]["outcome"] = CLIENT_CLOSED
        self._metrics.client_disconnects.labels(self._route.path).inc()

    async def _relay(self, scope: Scope, receive: Receive, send: Send, body: bytes, model: object) -> None:
        async with self._pool.place(model) as upstream:
            with self._in_flight:
                await self._relay_to(upstream, scope, receive, send, body)

    async def _relay_to(self, upstream: Upstream, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        try:
            async with upstream.exchange(self._route.method, target(scope), _request_headers(scope), body) as answer:
                if answer.status >= 400:
                    response = Response(await _mended(answer), answer.status, media_type="application/json")
                    ended_well = False
                else:
                    response = None
                    ended_well = await _relay_answer(answer, upstream, scope, send)
        except EngineGoneError as error:  # before anything was sent
            response = _engine_gone(error, upstream).response()
        if response is not None:
            await response(scope, receive, send)
        elif ended_well:
            # Last of all: once the response is complete, the server reports the client as disconnected.
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _relay_answer(answer: Answer, upstream: Upstream, scope: Scope, send: Send) -> bool:
    """Everything but the end. False where the connection must break instead of ending."""
    headers = [(name, value) for name, value in answer.headers if _passes_back(name)]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    is_event_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
    at_event_end = True
    try:
        async for chunk in answer.chunks():
            at_event_end = chunk.endswith((b"\n\n", b"\r\n\r\n"))
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except EngineGoneError as error:
        broken = _engine_gone(error, upstream)
        log.warning("response broke off", request_id=scope["state"]["request_id"], error=broken.message)
        scope["state"]["outcome"] = broken.status
        # Half an event cannot be taken back, so a client that got one must see the connection break. Leaving the
        # response unfinished makes the server break it.
        if not (is_event_stream and at_event_end):
            return False
        await send({"type": "http.response.body", "body": broken.event(), "more_body": True})
    return True


async def _mended(answer: Answer) -> bytes:
    """The body of an engine's error, mended."""
    body = b""
    async for chunk in answer.chunks():
        body += chunk
        if len(body) > mend.MAX_ERROR:
            break
    return mend.error_body(answer.status, body)


def _engine_gone(error: EngineGoneError, upstream: Upstream) -> APIError:
    status = upstream.status()
    state = "" if status.state is State.READY else f"; {status.explain()}"
    return APIError(502, "engine_unavailable", f"the engine broke off this request ({error}){state}")


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()


def target(scope: Scope) -> bytes:
    """The request's path and query, byte for byte."""
    path: bytes = scope["raw_path"]
    return path + b"?" + scope["query_string"] if scope["query_string"] else path


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
