"""What the gateway costs: tokens per second and time to first token, directly at the engine and through it.

Rounds alternate between the two ways, because the machine's load changes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from trials.gateway_clients import Connect, ask, stream

STREAMS = (1, 8, 32)
LENGTHS = (16, 112)  # tokens of an answer under a steady load: uniform, so that answers end and begin at all times


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

    Both ways in turn, `seconds` each. Requests of the first tenth of a round are left out, since they began at the same
    time.
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
    """CPU time of the gateway's process, in microseconds per request of one token and per further token of a stream.

    Other load on the machine changes CPU time less than it changes speeds.
    """

    async def spent(count: int, each: int, tokens: int) -> tuple[float, float]:
        asked = {**body, "max_tokens": tokens, "streams": 1}
        began = _cpu_seconds(pid)
        for _ in range(each):
            await asyncio.gather(*(stream(connect=through, body=asked) for _ in range(count)))
        user, system = (after - before for before, after in zip(began, _cpu_seconds(pid), strict=True))
        return 1e6 * user / (count * each), 1e6 * system / (count * each)

    rows: list[dict[str, Any]] = []
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
