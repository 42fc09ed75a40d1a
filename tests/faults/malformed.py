"""Requests that are wrong in some way, made from a seed: bodies, types, methods, paths; and raw bytes for a socket.

Each `Case` knows by construction whether its body is a JSON object, so that tests need no second parser to judge by.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
LIMIT = 4000  # bytes of a body; the gateway under test is started with it


@dataclass(frozen=True)
class Case:
    """One request. `sound`: its method, route and body are such that an engine may see it."""

    method: str
    path: str
    body: bytes
    sound: bool
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([0, -1, 1, 2**31, 2**63, -(2**64), 10**30]),
    lambda r: r.choice([0.0, -0.0, 1e-300, 1e308, 0.1]),
    lambda r: r.choice(["", "m", "\0", "🙂", "\u202e", "x" * 500, "../../etc/passwd", "{{7*7}}", "NaN", "-1"]),
    lambda _: [],
    lambda _: {},
    lambda r: [None] * r.randint(1, 9),
    lambda r: {"type": r.choice(["json_schema", "text", 5, None])},
    lambda r: nested(r.randint(1, 300)),
)
FIELDS = (
    *(
        "model",
        "prompt",
        "messages",
        "input",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
    ),
    *(
        "stream",
        "stream_options",
        "response_format",
        "logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "seed",
        "user",
        "x",
    ),
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def odd_object(r: random.Random) -> dict[str, Any]:
    """A JSON object whose fields have any type at all."""
    return {name: r.choice(VALUES)(r) for name in r.sample(FIELDS, r.randint(0, 6))}


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def no_object(r: random.Random) -> bytes:
    """Bytes that are no JSON object in UTF-8."""
    whole = encoded({"model": "m", "prompt": "Hello 🙂", "max_tokens": 5})
    kind = r.randrange(12)
    made: list[Callable[[], bytes]] = [
        lambda: whole[: r.randrange(len(whole))],
        lambda: r.randbytes(r.randint(1, 60)) + b"\xff",
        lambda: whole + r.choice([b"}", b"{}", b"x", b"\0", whole]),
        lambda: encoded(r.choice([[], [{}], "text", 5, None, True, 1.5])),
        lambda: whole.replace(b"5", r.choice([b"NaN", b"Infinity", b"-Infinity", b"05", b"+5", b"0x5", b"5.", b".5"])),
        lambda: whole.replace(b'"', b"'"),
        lambda: b"[" * r.randint(1, 3900),
        lambda: b'{"a":' * r.randint(1, 700),
        lambda: whole.replace(b"Hello", r.choice([b"\\ud800", b"\\uDFFF", b"\xc3", b"\xed\xa0\x80", b"\\x", b"\n"])),
        lambda: whole.decode().encode(r.choice(["utf-16", "utf-32", "utf-16-le", "utf-8-sig"])),
        lambda: whole.replace(b"5", r.choice([b"--5", b"5e", b"5_0", b"1,2", b"true5", b"0b1"])),
        lambda: b"model=m&prompt=Hello",
    ]
    return made[kind]()


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` requests; the same for the same seed."""
    r = random.Random(seed)  # noqa: S311
    for _ in range(count):
        kind = r.random()
        route = r.choice(ROUTES)
        if kind < 0.45:
            yield Case("POST", route, no_object(r), sound=False)
        elif kind < 0.8:
            body = encoded(odd_object(r))
            yield Case("POST", route, body, sound=len(body) <= LIMIT)
        elif kind < 0.85:
            yield Case("POST", route, b"{" + b" " * r.randint(LIMIT, 2 * LIMIT) + b"}", sound=False)
        elif kind < 0.92:
            method = r.choice(["GET", "PUT", "PATCH", "DELETE", "TRACE", "BREW"])
            yield Case(method, route, encoded(odd_object(r)), sound=False)
        else:
            path = r.choice([*ROUTES, "/v1", "/", "/health", "/sleep", "/invocations"])
            path += r.choice(["/", "/..", "%00", "/%2e%2e/metrics", ";x", "//", "/" + "a" * 3000])
            yield Case("POST", path, encoded(odd_object(r)), sound=False)


# Bytes that are no HTTP/1.1 request, each for a connection of its own: refused, or the connection closed.
NO_HTTP = (
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",  # and no more
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
)
# HTTP, but odd: any answer except a failure of ours.
ODD_HTTP = (
    b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: nonsense\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]GET / HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n",
    b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://example.org/ HTTP/1.1\r\nHost: x\r\n\r\n",
)
