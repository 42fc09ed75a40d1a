"""A fake engine that emits a fixed number of tokens per second, and the real gateway in front of it.

python -m trials.paced_engine engine SOCKET
python -m trials.paced_engine gateway SOCKET PORT
"""

import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATE = 2000  # tokens per second that the fake engine emits, over all its streams
PIECE = json.dumps(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1764460800,
        "model": "fake",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    }
)
EVENT = f"data: {PIECE}\n\n".encode()


async def fake_engine(path: str) -> None:
    """Serves every POST as a stream of `max_tokens` events, each at its time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # the client has left
            while True:
                await respond(reader, writer)
        writer.close()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = json.loads(await reader.readexactly(length))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        began = time.perf_counter()
        pace = body.get("streams", 1) / RATE
        for index in range(body.get("max_tokens", 1)):
            await asyncio.sleep(began + index * pace - time.perf_counter())
            writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        if b"connection: close" in head.lower():
            raise ConnectionResetError

    async with await asyncio.start_unix_server(answer, path, backlog=2048) as server:
        await server.serve_forever()


def gateway(path: str, port: int) -> None:
    """The gateway before the engine at `path`, as `voltserve serve` runs it, without a supervisor."""
    import uvloop

    from server import logs
    from server.config.devices import Devices
    from server.config.settings import load_config
    from server.gateway import Gateway
    from server.gateway.exchange import EngineSocket
    from server.gateway.limits import Admission
    from server.gateway.listener import http_server
    from server.gateway.pool import Pool, Upstream
    from server.supervisor import State, Status
    from server.supervisor.probe import engine_client

    config = load_config(["--model", "fake"], {}, lambda: Devices((), "none"))
    status = Status(State.READY, "for a benchmark", time.monotonic(), time.monotonic())
    admission = Admission(config.max_in_flight, config.queue_size, config.queue_timeout)
    logs.configure("info", "text")
    upstream = Upstream(config, engine_client(path), EngineSocket(path), lambda: status, admission)
    server = http_server(Gateway(config, Pool([upstream])), config.body_timeout)
    gc.collect()
    gc.freeze()
    with socket.create_server(("127.0.0.1", port), backlog=2048) as listening:
        uvloop.run(server.serve(sockets=[listening]))


@contextlib.contextmanager
def processes(folder: Path, port: int) -> Iterator[tuple[str, int]]:
    """The fake engine and the gateway; gives the path of the engine's socket and the gateway's process id."""
    path = str(folder / "engine.sock")
    command = [sys.executable, "-m", "trials.paced_engine"]
    with open(os.devnull, "wb") as null:  # noqa: PTH123
        started = [
            subprocess.Popen([*command, "engine", path], cwd=ROOT),
            subprocess.Popen([*command, "gateway", path, str(port)], cwd=ROOT, stderr=null),
        ]
        try:
            yield path, started[1].pid
        finally:
            for process in started:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        asyncio.run(fake_engine(sys.argv[2]))
    else:
        gateway(sys.argv[2], int(sys.argv[3]))
