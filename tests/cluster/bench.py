#!/usr/bin/env python
"""Throughput of 1, 2 and 3 replicas of `voltserve deploy`, with the CPU time of its gateway and of Ray's head.

Four machines are network namespaces of this one (tests/cluster/machines.py): Ray's head with the gateway, and three
with a replica each. The engines are scripted: tokens are DELAY seconds apart, and a replica takes SLOTS requests at
once. So three replicas need no more cores than there are. Read speeds as ratios, and CPU times as they are. This needs
root and `make setup-ray`:

    .venv/bin/python -m tests.cluster.bench --out docs/results/cluster-DATE.json
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from datetime import date
from pathlib import Path
from typing import Any

from tests.cluster.machines import Machine, Machines
from tests.cluster.ray_nodes import RayCluster
from tests.cluster.service import PORT, Service, serving
from tests.server.conftest import make_model
from trials.gateway_clients import Connect, Stream, stream

REPLICAS = (1, 2, 3)
SLOTS = 4  # requests at once of a replica: its --max-in-flight
DELAY = 0.02  # seconds of a token
TOKENS = 64  # of an answer
PLACE = "replica_place"
TICKS = os.sysconf("SC_CLK_TCK")
# What Ray keeps for the whole cluster, by a part of the command line; everything else on the head's machine is `other`.
CONTROL = {"gcs": "gcs_server", "raylet": "raylet/raylet", "controller": "ServeController", "directory": ":directory",
           "watch": "on_ray.watch"}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--seconds", type=float, default=20, help="of load for each number of replicas")
    parser.add_argument(
        "--idle", type=float, default=20, help="seconds without a request, to see what Ray does by itself"
    )
    parser.add_argument("--many", type=int, default=9, help="replicas at which only what Ray does by itself is seen")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Machines(Path(folder)) as machines:
        result = measure(RayCluster(machines, Path(folder)), args)
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(cluster: RayCluster, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, on a cluster that is to be started."""
    cluster.env = {"PYTHONPATH": str(Path.cwd())}
    head = cluster.start_head(cpus=2)
    workers = [cluster.start_worker(f"worker{number}", resources={PLACE: args.many}) for number in REPLICAS]
    directory = make_model(cluster.folder / "model", answer={"delay": DELAY})
    flags: dict[str, Any] = {"model": str(directory), "served-model-name": ["m"], "preset": "cpu-smoke"}
    flags |= {"max-in-flight": SLOTS, "queue-size": 1000}
    model: dict[str, Any] = {"name": "scripted", "flags": flags, "replicas": 1, "cpus": 0, "resources": {PLACE: 1}}
    model["per_node"] = -(-args.many // len(workers))  # Serve itself spreads them over the machines
    rows = []
    with serving(cluster, model) as service:
        for count in REPLICAS:
            if count > 1:
                service.update(replicas=count)
            machines = len(set(service.wait_for_replicas(count)))
            idle = control_load(head, args.idle)
            rows.append(
                {
                    "replicas": count,
                    "machines": machines,
                    "head_cpu_percent_idle": idle,
                    **load(service, head, count, args.seconds),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        both = ways(service, head, workers, args.seconds)
        service.update(replicas=args.many)
        service.wait_for_replicas(args.many)
        many = {"replicas": args.many, "head_cpu_percent_idle": control_load(head, args.idle)}
    one = rows[0]["tokens_per_second"]
    return {
        "kind": "measured", "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "load_average": os.getloadavg(), "command": " ".join(["tests.cluster.bench", *sys.argv[1:]]),
        "engine": "scripted, in place of the real one",
        "script": {"slots": SLOTS, "delay_s": DELAY, "tokens": TOKENS},
        "throughput_of_one": {str(row["replicas"]): round(row["tokens_per_second"] / one, 3) for row in rows},
        "replicas": rows, "one_replica_both_ways": both, "many": many,
    }  # fmt: skip


def load(service: Service, head: Machine, replicas: int, seconds: float) -> dict[str, Any]:
    """Three clients for each request that the replicas take at once, each asking again when it is answered."""
    pid = gateway_process(head)
    clients = 3 * SLOTS * replicas
    before, began = cpu_seconds(pid), time.perf_counter()
    done = asyncio.run(closed_loop(through(service), clients, seconds))
    spent, took = cpu_seconds(pid) - before, time.perf_counter() - began
    tokens = sum(one.tokens for one in done)
    return {
        "clients": clients,
        "requests": len(done),
        "tokens_per_second": round(tokens / took, 2),
        "share_of_the_script": round(tokens / took / (replicas * SLOTS / DELAY), 4),
        "ttft_p50_s": round(statistics.median(one.first for one in done), 3),
        "gateway_cpu_percent": round(100 * spent / took, 2),
        "gateway_cpu_us_a_token_requests_included": round(1e6 * spent / tokens, 1),
    }


def through(service: Service) -> Connect:
    """A connection to the gateway."""
    host = service.url.partition("//")[2].partition(":")[0]
    return lambda: asyncio.open_connection(host, PORT)


async def closed_loop(connect: Connect, clients: int, seconds: float, tokens: int = TOKENS) -> list[Stream]:
    """Streams of `clients` that ask again and again; those begun within `seconds` are waited for."""
    done: list[Stream] = []
    body = {"model": "m", "prompt": "Once upon a time", "ignore_eos": True, "max_tokens": tokens}
    end = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            done.append(await stream(connect, body))

    await asyncio.gather(*(client() for _ in range(clients)))
    return done


def ways(service: Service, head: Machine, workers: list[Machine], seconds: float) -> dict[str, Any]:
    """As many streams as one replica takes, at its engine's socket and through the gateway, in turn."""
    path = next(found for worker in workers if (found := engine_socket(worker)))

    def direct() -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_unix_connection(path)

    kinds = {"direct": direct, "gateway": through(service)}
    speed: dict[str, list[float]] = {kind: [] for kind in kinds}
    first: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in range(6):
        kind = ("direct", "gateway")[index % 2]
        done = asyncio.run(closed_loop(kinds[kind], SLOTS, seconds / 6))
        # Of the streams' own time: a round ends with its last answer, and may have room for one more or not.
        speed[kind].append(SLOTS * sum(one.tokens for one in done) / sum(one.end for one in done))
        first[kind] += [one.first for one in done]
    return {
        "streams": SLOTS,
        "tokens_per_second": {kind: round(statistics.median(values), 2) for kind, values in speed.items()},
        "gateway_of_direct": round(statistics.median(speed["gateway"]) / statistics.median(speed["direct"]), 4),
        "ttft_p50_ms": {kind: round(1000 * statistics.median(values), 2) for kind, values in first.items()},
        **request_and_token(service, head, workers),
    }


def request_and_token(service: Service, head: Machine, workers: list[Machine]) -> dict[str, Any]:
    """CPU time of the gateway, microseconds a request and a further token, from answers of two lengths."""
    pid = gateway_process(head)
    spent = {}
    for tokens, seconds in ((1, 6.0), (TOKENS, 12.0)):
        before = cpu_seconds(pid)
        done = asyncio.run(closed_loop(through(service), SLOTS * len(workers), seconds, tokens))
        spent[tokens] = 1e6 * (cpu_seconds(pid) - before) / len(done)
    a_token = (spent[TOKENS] - spent[1]) / (TOKENS - 1)
    return {"gateway_cpu_us_a_request": round(spent[1] - a_token), "gateway_cpu_us_a_token": round(a_token, 1)}


def processes(machine: Machine) -> dict[int, str]:
    """The command lines of the machine's processes, by their ids here."""
    space = Path(f"/proc/{machine.namespaces.first_process}/ns/pid").readlink()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/pid").readlink() == space:
                found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:  # it has ended
            continue
    return found


def gateway_process(head: Machine) -> int:
    """The process that is `voltserve deploy`."""
    return next(pid for pid, command in processes(head).items() if " tests.fakes.deploy " in command)


def engine_socket(worker: Machine) -> str:
    """Where the machine's engine listens; empty without one."""
    commands = " ".join(processes(worker).values())
    found = re.search(r"tests\.fakes\.engine .*?--uds (\S+)", commands)
    return found[1] if found else ""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (proc_pid_stat(5), fields 14 and 15), in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def control_load(head: Machine, seconds: float) -> dict[str, float]:
    """Percent of a core that each part of Ray takes on the head's machine while nothing is asked."""

    def spent() -> dict[int, tuple[str, float]]:
        found = {}
        for pid, command in processes(head).items():
            kind = next((kind for kind, part in CONTROL.items() if part in command), "other")
            try:
                found[pid] = (kind, cpu_seconds(pid))
            except OSError:
                continue
        return found

    before = spent()
    time.sleep(seconds)
    total: defaultdict[str, float] = defaultdict(float)
    for pid, (kind, used) in spent().items():
        total[kind] += used - before.get(pid, (kind, used))[1]
    return {kind: round(100 * total[kind] / seconds, 2) for kind in (*CONTROL, "other")}


if __name__ == "__main__":
    main()
