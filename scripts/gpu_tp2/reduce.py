"""Times all-reduces between ranks, and computes what they cost two V100s: reduce.py OUTPUT.json [--ranks 2]

A layer has two of them, of M x hidden numbers of 2 bytes for M tokens. The V100 rows are computed: fixed cost + bytes
over bandwidth. NCCL_P2P_DISABLE=1 takes the path through the host's memory.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

HIDDEN, LAYERS = 5120, 64  # Qwen3-32B
TOKENS = (1, 8, 16, 32, 2048)
ROUNDS, CALLS = 7, 50


@dataclass(frozen=True)
class Link:
    """What two V100s are joined by. An all-reduce of b bytes between two ranks moves b bytes each way."""

    fixed_s: float  # of one all-reduce
    bytes_s: float
    source: str


LINKS = {
    "V100 PCIe, host memory": Link(
        45e-6, 12e9, "30 to 60 µs through shared memory, stated; PCIe 3.0 x16 moves 12 GB/s"
    ),
    "V100 SXM2, NVLink": Link(
        12e-6, 100e9, "NCCL's launch and two hops, stated; 6 links of 25 GB/s, two thirds reached"
    ),
}


def computed(link: Link, tokens: int) -> dict[str, float]:
    """Of one all-reduce in microseconds, and of a step's in milliseconds."""
    seconds = link.fixed_s + 2 * tokens * HIDDEN / link.bytes_s
    return {"tokens": tokens, "us": round(1e6 * seconds, 1), "ms_a_step": round(1e3 * 2 * LAYERS * seconds, 2)}


def rank_main(rank: int, ranks: int, backend: str, store: Path, results: Any) -> None:
    """One rank: the median time of an all-reduce for each number of tokens, called one by one and in a CUDA graph."""
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    dtype = torch.float32 if backend == "gloo" else torch.float16
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for tokens in TOKENS:
        data = torch.ones(tokens, HIDDEN, dtype=dtype, device=device)
        distributed.all_reduce(data)
        if not bool((data == ranks).all()):
            raise RuntimeError(f"all-reduce of {tokens} x {HIDDEN}: expected {ranks} everywhere, got other sums")
        data.zero_()

        def calls(data: torch.Tensor = data) -> None:
            for _ in range(CALLS):
                distributed.all_reduce(data)

        row: dict[str, Any] = {"tokens": tokens, "us": median_us(calls, device)}
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            row["us_in_a_graph"] = median_us(graph.replay, device)
        rows.append(row)
    results.put(rows)
    distributed.destroy_process_group()


def median_us(calls: Any, device: torch.device) -> float:
    """Microseconds of one of the CALLS, the median of some rounds."""
    times = []
    for _ in range(ROUNDS):
        distributed.barrier()
        _wait(device)
        began = time.perf_counter()
        calls()
        _wait(device)
        times.append((time.perf_counter() - began) / CALLS)
    return round(1e6 * statistics.median(times), 2)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    arguments = parser.parse_args()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        sizes = (arguments.ranks, arguments.backend, Path(folder) / "store", results)
        ranks = [context.Process(target=rank_main, args=(rank, *sizes)) for rank in range(arguments.ranks)]
        for process in ranks:
            process.start()
        rows = [results.get(timeout=120) for _ in ranks]
        for process in ranks:
            process.join()
    measured = [{**one, "us": max(one["us"], two["us"])} for one, two in zip(rows[0], rows[-1], strict=True)]
    device = torch.cuda.get_device_name() if arguments.backend == "nccl" else "CPU"
    result = {
        "what": f"all-reduces of M x {HIDDEN} numbers of 2 bytes between {arguments.ranks} ranks, {arguments.backend}",
        "command": " ".join(sys.argv),
        "device": device,
        "nccl": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "measured": measured,
        "computed": {
            name: {"model": asdict(link), "rows": [computed(link, tokens) for tokens in TOKENS]}
            for name, link in LINKS.items()
        },
    }
    arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(measured)


if __name__ == "__main__":
    main()
