"""What the gateway costs: tokens per second and time to first token, through it and directly at the engine, in one run.

There are three processes: a fake engine at a fixed number of tokens per second, the real gateway, and the clients here.
Rounds alternate between the two ways, because the machine's load changes. Time to first token is measured in three
cases. Requests arrive one after another, under a steady load of 1, 8 and 32 streams, and all in the same instant. With
--socket, --url and --model a running service is measured instead; its log's "engine command" has the engine's socket.

    .venv/bin/python -m scripts.bench_gateway --out docs/results/gateway-overhead-DATE.json
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Awaitable
from datetime import date
from pathlib import Path
from typing import Any

from trials.gateway_cost import cost, measure, sequential, when_up
from trials.paced_engine import processes


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
        "engine": "fake, 2000 tokens per second in all" if args.url is None else "the real engine",
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
    args = parser.parse_args()
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
