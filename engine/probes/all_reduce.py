"""`python -m engine.probes.all_reduce`: checks the sums of a few all-reduces through NCCL and ours, a process per GPU.

It may hang if peer-to-peer is broken. The caller sets a time limit and kills its process group.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed

from engine.collective.all_reduce import AllReduce, AllReduceError

ELEMENTS = (1024, 8 * 2**20)  # float32; below and above NCCL's change of protocol
_ROUNDS = 5


def main() -> None:
    """Prints {backend, ranks, wrong, bytes, seconds, host_memory}.

    `wrong`: elements that differ. `seconds`: time of the largest size. `host_memory`: the problem of our all-reduce
    through host memory, "" if there is none, null without GPUs.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Forking before CUDA is touched spares each rank torch's import.
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(rank, args.ranks, args.backend, Path(folder) / "store", results))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    failed = [f"rank {rank} exited with {process.exitcode}" for rank, process in enumerate(ranks) if process.exitcode]
    if failed:
        raise SystemExit("; ".join(failed))
    answers = [results.get() for _ in ranks]
    answer = {
        "backend": args.backend,
        "ranks": args.ranks,
        "wrong": sum(wrong for wrong, _, _ in answers),
        "bytes": 4 * ELEMENTS[-1],
        "seconds": max(seconds for _, seconds, _ in answers),
        "host_memory": answers[0][2],
    }
    print(json.dumps(answer))


Result = tuple[int, float, str | None]


def _rank(rank: int, ranks: int, backend: str, store: Path, results: "multiprocessing.SimpleQueue[Result]") -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # one machine: nothing leaves it
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    wrong, seconds = 0, 0.0
    for count in ELEMENTS:
        for round_number in range(_ROUNDS):
            data = torch.arange(count, dtype=torch.float32, device=device) % 97 + rank + round_number
            expected = (torch.arange(count, dtype=torch.float32) % 97 + round_number) * ranks + ranks * (ranks - 1) / 2
            _wait(device)
            began = time.perf_counter()
            distributed.all_reduce(data)
            _wait(device)
            seconds = time.perf_counter() - began
            wrong += int((data.cpu() != expected).sum())
    host_memory = _host_memory(device) if device.type == "cuda" else None
    results.put((wrong, round(seconds, 6), host_memory))
    distributed.destroy_process_group()


def _host_memory(device: torch.device) -> str:
    import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve

    try:
        return AllReduce(distributed.new_group(backend="gloo"), device, "host memory").trial()
    except AllReduceError as error:
        return str(error)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
