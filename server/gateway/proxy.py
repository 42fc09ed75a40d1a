"""Passes one request to the engine and its response back, chunk by chunk, and ends both sides together.

When a client disconnects, the request to the engine is closed at once, before or after the first byte. The engine then
aborts the sequence. When an engine disconnects, the client never sees a normal end. It gets a 502 before the first
byte, an error event at the end of an event stream, and a broken connection otherwise. If no byte of the answer has
arrived and another engine serves the model, the request goes to that engine instead.
"""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.gateway import mend
from server.gateway.early import OF_EVENTS, EarlyStream
from server.gateway.errors import APIError
from server.gateway.exchange import Answer, EngineGoneError, Headers
from server.gateway.guard import Guard, check_media, parse_object
from server.gateway.metrics import Metrics
from server.gateway.pool import Pool, Upstream
from server.gateway.routes import ProxiedRoute
from server.supervisor import State

# Hop-by-hop fields (RFC 9110, 7.6.1), and those that each connection states for itself.
_PER_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    b"content-length expect".split()
)
# A client's credentials are for the gateway; the gateway sets its own request id.
_NOT_FOR_THE_ENGINE = _PER_CONNECTION | {b"authorization", b"cookie", b"x-request-id"}
# A body that was read here is JSON; vLLM accepts it under no other content type.
_OF_A_BODY = frozenset({b"content-type", b"content-encoding"})
_NOT_FOR_THE_CLIENT = (_PER_CONNECTION | {b"date", b"server", b"x-request-id"}) - {b"content-length"}

# How vLLM's streams report an error after their beginning. Generated text cannot look so: JSON escapes its quotes.
_ERROR_EVENT = b'data: {"error"'

ENGINES_TRIED = 3  # per request; a request that kills engines must not kill them all

CLIENT_CLOSED = 499  # nginx's status for a request whose client went away; never sent, only logged and counted

log = structlog.get_logger("voltserve.gateway")


class InFlight:
    """Counts the requests at the engine, and lets others wait until there are none."""

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
        scope["route"] = self._route
        try:
            with self._guard.admitted(scope, generates=self._route.has_body):
                await self._answer(scope, receive, send)
        except APIError as error:
            self._metrics.refused.labels(error.code).inc()
            early: EarlyStream | None = scope["state"].get("early")
            await error.response()(scope, receive, send if early is None else early.send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._route.has_body:
            check_media(scope)
        body = await self._guard.body(scope, receive)
        if body is None:
            self._client_left(scope)
            return
        model, about = None, scope.get("path_params", {}).get("response_id", "")
        if self._route.has_body:
            request = parse_object(body)
            self._guard.check_size(request)
            model, about = request.get("model"), request.get("previous_response_id")
            body = self._guard.begin(scope, request, body, self._pool)
            if self._pool.on_demand and self._route.streams and request.get("stream") is True:
                scope["state"]["early"] = early = EarlyStream(scope, send)
                send = early.send
        if not await _while_the_client_stays(self._relay(scope, receive, send, body, model, about), receive):
            self._client_left(scope)

    def _client_left(self, scope: Scope) -> None:
        if scope["state"].setdefault("outcome", CLIENT_CLOSED) == CLIENT_CLOSED:  # and not cut off by us
            self._metrics.client_disconnects.labels(self._route.path).inc()

    async def _relay(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, model: object, about: object
    ) -> None:
        early: EarlyStream | None = scope["state"].get("early")
        tell = early.comment if early is not None else None
        response_id = about if isinstance(about, str) else ""
        tried: list[Upstream] = []
        gone: APIError | None = None
        while True:
            try:
                async with self._pool.place(model, response_id, tried, tell) as upstream:
                    with self._in_flight:
                        await self._relay_to(upstream, scope, receive, send, body)
            except EngineGoneError as error:  # before anything was sent
                tried.append(upstream)
                gone = _engine_gone(error, upstream)
            except APIError as error:
                raise gone or error from None  # no other engine to try: why the first failed says more
            else:
                return
            if len(tried) == ENGINES_TRIED or not self._pool.has_other(model, tried):
                raise gone
            log.warning("tried at another engine", request_id=scope["state"]["request_id"], error=gone.message)

    async def _relay_to(self, upstream: Upstream, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        headers = _request_headers(scope, has_json=self._route.has_body)
        async with upstream.exchange(self._route.method, target(scope), headers, body) as answer:
            if answer.status >= 400:
                response = Response(await _mended(answer), answer.status, media_type="application/json")
                ended_well = False
            else:
                response = None
                ended_well = await _relay_answer(answer, upstream, self._pool.several, scope, send)
        if response is not None:
            await response(scope, receive, send)
        elif ended_well:
            # Last of all: once the response is complete, the server reports the client as disconnected.
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _relay_answer(answer: Answer, upstream: Upstream, hold: bool, scope: Scope, send: Send) -> bool:
    """Sends the answer, except its end. False where the connection must break instead of ending.

    Raises:
        EngineGoneError: it disconnected before anything was sent. With `hold`, the head waits for the body's first
        byte.
    """
    headers = [field for field in answer.headers if field[0] not in _NOT_FOR_THE_CLIENT]
    is_event_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
    if is_event_stream:
        headers += [field for field in OF_EVENTS if field not in headers]
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    at_event_end = True
    before = b""  # the end of the last chunk, where it was no event's end
    if not hold:
        await send(start)
    try:
        meter = scope["state"].get("meter")
        async for chunk in answer.chunks() if meter is None else meter.chunks(answer):
            if hold:
                hold = False
                await send(start)
            if is_event_stream:
                if _ERROR_EVENT in (known := before + chunk):
                    scope["state"]["outcome"] = _status_of(known)
                at_event_end = chunk.endswith((b"\n\n", b"\r\n\r\n"))
                before = b"" if at_event_end else known[1 - len(_ERROR_EVENT) :]
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except EngineGoneError as error:
        if hold:
            raise
        broken = _engine_gone(error, upstream)
        log.warning("response broke off", request_id=scope["state"]["request_id"], error=broken.message)
        scope["state"]["outcome"] = broken.status
        # Half an event cannot be taken back, so a client that got one must see the connection break. Leaving the
        # response unfinished makes the server break it.
        if not (is_event_stream and at_event_end):
            return False
        await send({"type": "http.response.body", "body": broken.event(), "more_body": True})
    if hold:  # a response without a body
        await send(start)
    return True


def _status_of(events: bytes) -> int:
    """The status in the first error event; 500 where it has none, or has not arrived as a whole."""
    line = events[events.index(_ERROR_EVENT) :].partition(b"\n")[0]
    try:
        code = json.loads(line.removeprefix(b"data: "))["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500


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


async def _while_the_client_stays(relay: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Whether `relay` finished. Once the client disconnects, `relay` is cancelled: it leaves the queue or closes its
    connection to the engine.
    """
    relaying = asyncio.current_task()
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        if relaying is not None:
            relaying.cancel()

    watching = asyncio.create_task(watch())
    try:
        await relay
    except asyncio.CancelledError:
        if not left:
            raise
        return False
    finally:
        watching.cancel()
    return True


def target(scope: Scope) -> bytes:
    """The request's path and query, byte for byte."""
    path: bytes = scope["raw_path"]
    return path + b"?" + scope["query_string"] if scope["query_string"] else path


def _request_headers(scope: Scope, *, has_json: bool) -> Headers:
    named = b",".join([value for name, value in scope["headers"] if name == b"connection"]).lower()
    # Fields that `Connection` names are hop-by-hop too.
    dropped = _NOT_FOR_THE_ENGINE.union(map(bytes.strip, named.split(b","))) if named else _NOT_FOR_THE_ENGINE
    if has_json:
        dropped |= _OF_A_BODY
    kept = [field for field in scope["headers"] if field[0] not in dropped]
    if has_json:
        kept.append((b"content-type", b"application/json"))
    kept.append((b"x-request-id", scope["state"]["request_id"].encode("ascii")))
    return kept
