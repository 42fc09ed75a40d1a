"""Clients that speak HTTP/1.1 by hand, so that they cost the same on either way."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class Stream:
    """One client's stream: seconds to its first event and to its end, and its events."""

    first: float
    end: float
    tokens: int


async def stream(connect: Connect, body: dict[str, Any]) -> Stream:
    """Asks for one stream on a connection of its own, which is part of its time, and reads it to its end."""
    began = time.perf_counter()
    return await ask(*await connect(), body, began)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any], began: float) -> Stream:
    """Asks for one stream on this connection, and closes it at the end; times are counted from `began`."""
    payload = json.dumps({**body, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
    )
    first = 0.0
    received = b""
    while part := await reader.read(65536):
        received += part
        if not first and b"data: {" in received:
            first = time.perf_counter() - began
    writer.close()
    if b"data: [DONE]" not in received:
        raise RuntimeError(f"a stream ended early: {received[-300:]!r}")
    return Stream(first, time.perf_counter() - began, received.count(b"data: {"))
