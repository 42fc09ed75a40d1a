"""One streamed completion, timed.

While an answer arrives, only the time and the bytes of each piece are stored. Events are parsed after its end, so the
generator's own work stays out of the latencies. Each request has its own connection.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from server.bench.prompts import BenchError, Target

MAX_ERROR = 300  # characters of an error that are kept


@dataclass(frozen=True)
class Outcome:
    """One request. Times in seconds since the level began.

    `due`: the planned time of sending; `sent`: the actual time; `events`: the arrival of each piece of text (usually
    one token, but an engine may send several at once); `ended`: the end of the answer. `prompt_tokens` and
    `output_tokens` as the server counts them (`usage`). `error` is empty where all of that holds.
    """

    due: float
    sent: float
    events: tuple[float, ...]
    ended: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""


class Client:
    """Sends requests to one target. `clock` gives seconds; a level's start is its zero.

    Raises:
        BenchError: the URL is not one of HTTP.
    """

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        parts = urlsplit(target.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise BenchError(f"expected a URL such as http://127.0.0.1:8000, got {target.url!r}")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._clock = clock
        fields = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", "connection": "close"}
        lines = [f"{name}: {value}\r\n" for name, value in {**fields, **target.headers}.items()]
        self._head = f"POST {parts.path}/v1/completions HTTP/1.1\r\n{''.join(lines)}"
        self._model = target.model

    async def complete(self, prompt: list[int], output_len: int, due: float, limit: float) -> Outcome:
        """Asks for exactly `output_len` tokens after `prompt`; what fails within `limit` seconds is an `error`."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output_len,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"{self._head}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        sent = self._clock()
        stream, error = None, ""
        try:
            stream = await asyncio.wait_for(self._exchange(head + body), limit)
        except asyncio.TimeoutError:
            error = f"no complete answer within {limit:g} s"
        except OSError as problem:
            error = f"cannot connect: {problem.strerror or problem}"
        if stream is None:
            return Outcome(due, sent, (), self._clock(), 0, 0, error)
        return read_answer(stream.status, stream.pieces, stream.problem, due, sent, (len(prompt), output_len))

    async def _exchange(self, request: bytes) -> "_Stream":
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(
            lambda: _Stream(self._clock), self._host, self._port, ssl=self._tls
        )
        try:
            transport.write(request)
            await stream.ended
            return stream
        finally:
            transport.abort()


def read_answer(
    status: int, pieces: list[tuple[float, bytes]], problem: str, due: float, sent: float, lengths: tuple[int, int]
) -> Outcome:
    """Reads an answer: a pure function of the `pieces` of its body, each with its time of arrival.

    Args:
        status: the HTTP status.
        pieces: (seconds, bytes) in order.
        problem: the connection's problem, or empty.
        due: the planned time of sending.
        sent: the actual time of sending.
        lengths: tokens of the prompt and of the output, as asked for.
    """
    ended = pieces[-1][0] if pieces else sent
    if status != 200 or problem:
        text = problem or f"{status}: {_message(b''.join(piece for _, piece in pieces))}"
        return Outcome(due, sent, (), ended, 0, 0, text[:MAX_ERROR])
    times: list[float] = []
    usage: dict[str, Any] = {}
    done, rest = False, b""
    for moment, piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                done = True
            if data == b"[DONE]" or not event.strip().startswith(b"data:"):  # other lines keep connections alive
                continue
            value = _parsed(data)
            if "error" in value:
                return Outcome(due, sent, tuple(times), moment, 0, 0, _message(data)[:MAX_ERROR])
            if value.get("choices"):
                times.append(moment)
            usage = value.get("usage") or usage
    counted = (int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
    error = ""
    if not done:
        error = "the stream ended early"
    elif not times:
        error = "no token came"
    elif counted != lengths:
        error = f"expected {lengths[0]} + {lengths[1]} tokens, got {counted[0]} + {counted[1]}"
    return Outcome(due, sent, tuple(times), times[-1] if times else ended, counted[0], counted[1], error)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {"error": f"not JSON: {data[:80]!r}"}
    return value if isinstance(value, dict) else {}


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the body as it is."""
    error = _parsed(body).get("error")
    return str(error["message"] if isinstance(error, dict) and "message" in error else error or body.decode("latin-1"))


class _Stream(asyncio.Protocol):
    """A response: `status`, `pieces` of the body with their times, `problem`; `ended` is set when it is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self.problem = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._end(f"the connection broke: {error}" if error else "the connection was closed before the end")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._end("")

    def _end(self, problem: str) -> None:
        if not self.ended.done():
            self.problem = problem
            self.ended.set_result(None)
