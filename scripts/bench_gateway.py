#!/usr/bin/env python
"""What the gateway costs: tokens a second and time to first token, through it and directly at the engine, in one run.

Three processes: a fake engine that emits a fixed number of tokens a second over all its streams, the real gateway code
in front of it, and the clients here, which speak HTTP/1.1 by hand so that they cost the same on either way. Rounds
alternate between the two ways, because the machine's load changes. Time to first token is measured one request after
another, under a steady load of 1, 8 and 32 streams, and for as many requests in the same instant, which queue for one
core. With --socket, --url and --model a running service is measured instead (its engine's socket is in its log's
"engine command").

    .venv/bin/python -m scripts.bench_gateway --out docs/results/gateway-overhead-DATE.json
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

RATE = 2000  # tokens a second that the fake engine emits, over all its streams
STREAMS = (1, 8, 32)
LENGTHS = (16, 112)  # tokens of an answer under a steady load: uniform, so that answers end and begin at all times
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
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def fake_engine(path: str) -> None:
    """Serves every POST as a stream of `max_tokens` events, each at its time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # whoever asked is gone
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


async def open_already(
    direct: Connect, through: Connect, body: dict[str, Any], count: int, rounds: int
) -> dict[str, float]:
    """Time to first token of `count` requests in the same instant on connections that are open, as clients keep them;
    both ways in turn.
    """
    firsts: dict[str, list[float]] = {"direct": [], "gateway": []}
    asked = {**body, "max_tokens": 16, "streams": count}
    for index in range(2 * rounds):
        way, connect = (("direct", direct), ("gateway", through))[index % 2]
        connections = [await connect() for _ in range(count)]
        await asyncio.sleep(0.05)  # they are accepted
        began = time.perf_counter()
        done = await asyncio.gather(*(ask(*connection, asked, began) for connection in connections))
        firsts[way] += [1000 * one.first for one in done]
    return _both({way: statistics.median(values) for way, values in firsts.items()})


async def steady(
    direct: Connect, through: Connect, body: dict[str, Any], count: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Time to first token under a load of `count` streams: each asks for the next answer when its last has ended.

    Both ways in turn, `seconds` each. What was asked in the first tenth of a round is left out, since it began at once.
    """
    firsts: dict[str, list[float]] = {"direct": [], "gateway": []}
    lengths = random.Random(count)  # noqa: S311  # lengths, not secrets

    async def one_stream(connect: Connect, began: float, kept: list[float]) -> None:
        while (now := time.perf_counter() - began) < seconds:
            done = await stream(connect, {**body, "max_tokens": lengths.randint(*LENGTHS), "streams": count})
            if now > seconds / 10:
                kept.append(1000 * done.first)

    for index in range(2 * rounds):
        way, connect = (("direct", direct), ("gateway", through))[index % 2]
        began = time.perf_counter()
        await asyncio.gather(*(one_stream(connect, began, firsts[way]) for _ in range(count)))
    return {
        "requests_each_way": min(map(len, firsts.values())),
        "p50": _both({way: statistics.median(values) for way, values in firsts.items()}),
        "p99": _both({way: statistics.quantiles(values, n=100)[98] for way, values in firsts.items()}),
    }


def _both(median: dict[str, float]) -> dict[str, float]:
    """Milliseconds either way, and what the gateway adds."""
    rounded = {way: round(value, 3) for way, value in median.items()}
    return {**rounded, "added": round(median["gateway"] - median["direct"], 3)}


async def measure(
    direct: Connect, through: Connect, body: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Both ways at each number of streams, alternating."""
    rows, tokens, rounds = [], args.tokens, args.rounds
    for count in STREAMS:
        each = max(32, tokens // count)
        speeds: dict[str, list[float]] = {"direct": [], "gateway": []}
        firsts: dict[str, list[float]] = {"direct": [], "gateway": []}
        for index in range(2 * rounds):
            way, connect = (("direct", direct), ("gateway", through))[index % 2]
            asked = {**body, "max_tokens": each, "streams": count}
            began = time.perf_counter()
            done = await asyncio.gather(*(stream(connect, asked) for _ in range(count)))
            speeds[way].append(sum(one.tokens for one in done) / (time.perf_counter() - began))
            firsts[way] += [one.first for one in done]
        speed = {way: statistics.median(values) for way, values in speeds.items()}
        rows.append(
            {
                "streams": count,
                "tokens_each": each,
                "tokens_per_second": {way: round(value, 1) for way, value in speed.items()},
                "tokens_per_second_lost_percent": round(100 * (1 - speed["gateway"] / speed["direct"]), 2),
                "ttft_ms_steady": await steady(direct, through, body, count, rounds, args.seconds),
                "ttft_p50_ms_same_instant": _both(
                    {way: 1000 * statistics.median(values) for way, values in firsts.items()}
                ),
                "ttft_p50_ms_same_instant_open_connections": await open_already(
                    direct, through, body, count, 4 * rounds
                ),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def sequential(direct: Connect, through: Connect, body: dict[str, Any], count: int) -> dict[str, float]:
    """Time to first token of single requests one after another, both ways in turn."""
    firsts: dict[str, list[float]] = {"direct": [], "gateway": []}
    for index in range(2 * count):
        way, connect = (("direct", direct), ("gateway", through))[index % 2]
        firsts[way].append(1000 * (await stream(connect, {**body, "max_tokens": 1})).first)
    return _both({way: statistics.median(values) for way, values in firsts.items()})


async def cost(pid: int, through: Connect, body: dict[str, Any], requests: int) -> list[dict[str, Any]]:
    """CPU time of the gateway's process, microseconds a request of one token and a further token of a stream.

    Other load on the machine changes CPU time less than it changes speeds.
    """

    async def spent(count: int, each: int, tokens: int) -> tuple[float, float]:
        asked = {**body, "max_tokens": tokens, "streams": 1}
        began = _cpu_seconds(pid)
        for _ in range(each):
            await asyncio.gather(*(stream(connect=through, body=asked) for _ in range(count)))
        user, system = (after - before for before, after in zip(began, _cpu_seconds(pid), strict=True))
        return 1e6 * user / (count * each), 1e6 * system / (count * each)

    rows = []
    for count in STREAMS:
        user, system = await spent(count, max(1, requests // count), tokens=1)
        rows.append({"streams": count, "user_us_a_request": round(user), "system_us_a_request": round(system)})
        print(json.dumps(rows[-1]), flush=True)
    user, system = await spent(32, 4, tokens=101)
    per_token = {"user_us_a_token": round(user / 101, 1), "system_us_a_token": round(system / 101, 1)}
    rows.append({"streams": 32, **per_token})
    print(json.dumps(rows[-1]), flush=True)
    return rows


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process (proc_pid_stat(5), fields 14 and 15), in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


@contextlib.contextmanager
def processes(folder: Path, port: int) -> Iterator[tuple[str, int]]:
    """The fake engine and the gateway; gives the path of the engine's socket and the gateway's process id."""
    path = str(folder / "engine.sock")
    command = [sys.executable, __file__]
    with open(os.devnull, "wb") as null:  # noqa: PTH123
        started = [
            subprocess.Popen([*command, "--as-engine", path]),
            subprocess.Popen([*command, "--as-gateway", path, "--port", str(port)], stderr=null),
        ]
        try:
            yield path, started[1].pid
        finally:
            for process in started:
                process.terminate()
                process.wait()


async def when_up(*ways: Connect) -> None:
    """Returns once both ways answer."""
    for connect in ways:
        for _ in range(600):
            with contextlib.suppress(OSError):
                _, writer = await connect()
                writer.close()
                break
            await asyncio.sleep(0.1)
        else:
            raise TimeoutError("not up within a minute")


async def bench(
    path: str, port: int, pid: int | None, body: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """The whole measurement; `pid` is the gateway's process, where its CPU time is to be measured."""

    def direct() -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_unix_connection(path)

    def through() -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_connection("127.0.0.1", port)

    await when_up(direct, through)
    await sequential(direct, through, body, 5)  # warms both up
    single = await sequential(direct, through, body, args.singles)
    print(json.dumps({"ttft_p50_ms_sequential": single}), flush=True)
    costs = [] if pid is None else await cost(pid, through, body, args.requests)
    return {
        "kind": "measured",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "load_average": os.getloadavg(),
        "command": " ".join(["scripts/bench_gateway.py", *sys.argv[1:]]),
        "engine": "fake, 2000 tokens a second in all" if args.url is None else "the real engine",
        "rounds": args.rounds,
        "gateway_cpu_time": costs,
        "ttft_p50_ms_sequential": single,
        "streams": await measure(direct, through, body, args),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a round, over all streams")
    parser.add_argument("--seconds", type=float, default=8, help="of steady load, each way, in a round")
    parser.add_argument("--singles", type=int, default=200, help="single requests for the time to first token")
    parser.add_argument("--requests", type=int, default=2000, help="requests to measure the gateway's CPU time by")
    parser.add_argument("--url", help="http://127.0.0.1:PORT of a running service, instead of the fake engine")
    parser.add_argument("--socket", help="that service's engine's socket")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("--as-engine", help=argparse.SUPPRESS)
    parser.add_argument("--as-gateway", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_engine:
        asyncio.run(fake_engine(args.as_engine))
    elif args.as_gateway:
        gateway(args.as_gateway, args.port)
    else:
        body = {"model": args.model, "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
        if args.url:
            result = asyncio.run(bench(args.socket, int(args.url.rsplit(":", 1)[1]), None, body, args))
        else:
            with tempfile.TemporaryDirectory() as folder, processes(Path(folder), args.port) as (path, pid):
                result = asyncio.run(bench(path, args.port, pid, body, args))
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
