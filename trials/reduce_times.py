"""Times of all-reduces between ranks, ours and NCCL's side by side, each way in processes of its own.

Sums are checked first (reduce_check.py). Times are medians of one call among many, one after the other. In a graph they
say what the GPUs need.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from engine.collective.all_reduce import AllReduce, AllReduceError
from engine.ops import add_rms_norm
from kernels.tools.native_all_reduce import BLOCKS, ReduceLibrary
from trials import reduce_check

HIDDEN, LAYERS = 5120, 64  # Qwen3-32B
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 102, 512)
ROUNDS, CALLS = 9, 64
NORM_ROWS = 64  # of one call
SWEPT = (1, 4, 8, 16, 32, 102)
WAYS: dict[str, tuple[Any, dict[str, str]]] = {
    "shared": ("host memory", {"NCCL_P2P_DISABLE": "1"}),
    "peer": ("peer memory", {}),
}


def rank_main(rank: int, way: str, arguments: argparse.Namespace, store: Path, results: Any) -> None:
    """One rank of one way: what was checked, then times."""
    transport, environment = WAYS[way]
    os.environ.update(environment)
    gloo = arguments.backend == "gloo"
    device = torch.device("cpu") if gloo else torch.device("cuda", rank)
    if not gloo:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        arguments.backend, init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    result: dict[str, Any] = {"device": "CPU" if gloo else torch.cuda.get_device_name()}
    calls: dict[str, Callable[[torch.Tensor], Any]] = {"nccl": distributed.all_reduce}
    if not gloo:
        group = distributed.new_group(backend="gloo")
        try:
            ours = AllReduce(group, device, transport)
            result["trial"] = ours.trial()
            result["checked"] = reduce_check.check(ours, device, arguments.repeats)
            calls |= {"ours": ours} | with_norm(ours, device)
        except AllReduceError as error:
            result["trial"] = str(error)
    result["rows"] = [
        row(name, call, tokens, device)
        for tokens in arguments.tokens
        for name, call in calls.items()
        if name == "nccl" or tokens <= (NORM_ROWS if "norm" in name else reduce_check.LARGEST // 2 // HIDDEN)
    ]
    if arguments.sweep and "ours" in calls:
        result["rows"] += list(sweep(ours, ReduceLibrary(arguments.sweep), device))
    results.put((rank, result))
    distributed.barrier()
    distributed.destroy_process_group()


def with_norm(ours: AllReduce, device: torch.device) -> dict[str, Callable[[torch.Tensor], Any]]:
    """The sum, the addition to a residual and its RMS norm: in two kernels, and in one."""
    residual = torch.zeros(NORM_ROWS, HIDDEN, dtype=torch.float16, device=device)
    weight = torch.ones(HIDDEN, dtype=torch.float16, device=device)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(ours(x), residual[: len(x)], weight, 1e-6)

    def together(x: torch.Tensor) -> torch.Tensor:
        return ours.rms_norm(x, residual[: len(x)], weight, 1e-6)

    return {"ours, then norm": apart, "ours with norm": together}


def sweep(ours: AllReduce, library: ReduceLibrary, device: torch.device) -> Iterator[dict[str, Any]]:
    """Several numbers of blocks; the limit in kernels/cuda/all_reduce/plan.h follows from them."""
    for tokens in SWEPT:
        x = torch.ones(tokens, HIDDEN, dtype=torch.float16, device=device)
        planned = library.plan(x.numel())
        for blocks in sorted({planned, *(few for few in (8, 16, 32, BLOCKS) if few < planned)}):
            y = torch.zeros_like(x)
            launch = library.all_reduce(x, y, *ours.places(), 10.0, blocks)
            made = row(f"{blocks} blocks", partial(_launched, launch), tokens, device)
            yield made | {"wrong": int((y != ours.ranks).sum())}


def _launched(launch: Callable[[], Any], _x: torch.Tensor) -> Any:
    return launch()


def sums_main(rank: int, way: str, arguments: argparse.Namespace, store: Path, results: Any) -> None:
    """One rank that sums each size once and nothing else, for compute-sanitizer."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    ours = AllReduce(distributed.group.WORLD, torch.device("cuda", rank), WAYS[way][0])
    sums = list(reduce_check.sums(ours, torch.device("cuda", rank)))
    norms = list(reduce_check.norms(ours, torch.device("cuda", rank)))
    wrong = {"wrong_sums": sum(wrong for wrong, _ in sums), "wrong_norms": sum(wrong for wrong, _ in norms)}
    results.put((rank, {"sums": len(sums), "norms": len(norms)} | wrong))


def dead_main(rank: int, way: str, arguments: argparse.Namespace, store: Path, results: Any) -> None:
    """One rank of a group in which only rank 0 calls. Its GPU is lost at the end, so it has no NCCL."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    ours = AllReduce(distributed.group.WORLD, torch.device("cuda", rank), WAYS[way][0])
    results.put((rank, reduce_check.answer_of_the_dead(ours)))
    results.close()
    results.join_thread()
    os._exit(0)


def row(name: str, call: Callable[[torch.Tensor], Any], tokens: int, device: torch.device) -> dict[str, Any]:
    """One size and one way to sum: called one by one, and in a CUDA graph."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    data = torch.zeros(tokens, HIDDEN, dtype=dtype, device=device)
    made: dict[str, Any] = {"way": name, "tokens": tokens, "bytes": data.nbytes}

    def many() -> None:
        for _ in range(CALLS):
            call(data)

    many()
    made["us"] = median_us(many, device)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        graph.replay()
        made["us_in_a_graph"] = median_us(graph.replay, device)
    return made


def median_us(calls: Callable[[], Any], device: torch.device) -> float:
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


def guarded(of_rank: Callable[..., None], rank: int, *rest: Any) -> None:
    """Reports an exception as the rank's answer, so that nobody waits for it."""
    try:
        of_rank(rank, *rest)
    except Exception:
        rest[-1].put((rank, {"error": traceback.format_exc()}))
        raise


def run(way: str, of_rank: Callable[..., None], arguments: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Each rank's report. Raises RuntimeError with a rank's exception."""
    # Forked before CUDA is touched, which spares each rank torch's import.
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=guarded, args=(of_rank, rank, way, arguments, Path(folder) / "store", results))
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        try:
            told: dict[int, dict[str, Any]] = {}
            while len(told) < len(ranks):
                rank, answer = results.get(timeout=arguments.limit)
                if "error" in answer:
                    raise RuntimeError(f"rank {rank}: {answer['error']}")
                told[rank] = answer
            return told
        finally:
            for process in ranks:
                process.join(1 if sys.exc_info()[0] else 15)
                process.kill()


def slower(told: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's answer with the slowest rank's times, and all ranks' counts of what was wrong."""
    merged = told[0]
    for key in merged.get("checked", {}):
        if key.startswith("wrong"):
            merged["checked"][key] = sum(answer["checked"][key] for answer in told.values())
    for index, one in enumerate(merged["rows"]):
        for key in one.keys() & {"us", "us_in_a_graph"}:
            one[key] = max(answer["rows"][index][key] for answer in told.values())
    return merged
