"""Whether our all-reduce sums right: every size and dtype, many calls in graphs, ranks that come late or never."""

import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from engine.collective.all_reduce import AllReduce

LARGEST = 1 << 20  # bytes of one call
COUNTS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    511,
    2048,
    2049,
    5119,
    5120,
    8192,
    20_479,
    20_480,
    20_481,
    20_488,
    65_535,
    163_840,
    262_144,
)
HIDDEN = 5120
EPS = 1e-6
IN_A_GRAPH = (1, 8, 2, 32, 4, 16, 1, 1, 102, 3)  # tokens of calls that follow each other
DELAYS = 200
DEAD_LIMIT = 2.0


def check(ours: AllReduce, device: torch.device, repeats: int) -> dict[str, Any]:
    """All checks; the counts of wrong elements must be 0."""
    began = time.perf_counter()
    found, normed = list(sums(ours, device)), list(norms(ours, device))
    return {
        "counts_and_dtypes": len(found),
        "wrong_sums": sum(wrong for wrong, _ in found),
        "norms": len(normed),
        "wrong_norms": sum(wrong for wrong, _ in normed),
        "other_bits_on_another_rank": sum(differ for _, differ in [*found, *normed]),
        "for_nccl": _for_nccl(ours, device),
        "refused": _refused(ours, device),
        "repeats": repeats,
        "wrong_in_repeats": _repeats(ours, device, repeats),
        "uneven_arrivals": DELAYS,
        "wrong_after_uneven_arrivals": _uneven(ours, device),
        "seconds": round(time.perf_counter() - began, 1),
    }


def sums(ours: AllReduce, device: torch.device) -> Iterator[tuple[int, bool]]:
    """Elements that lie further from the float64 sum than one rounding, and whether ranks' bits differ."""
    for dtype in (torch.float16, torch.float32):
        for count in COUNTS:
            if count * dtype.itemsize > LARGEST:
                continue
            shares = [_normal(count, dtype, count * ours.ranks + rank) for rank in range(ours.ranks)]
            # A slice of rows that begins inside another tensor, as vLLM's padded batches give.
            room = torch.full((count + 16,), float("nan"), dtype=dtype, device=device)
            x = room[8 : 8 + count]
            x.copy_(shares[ours.rank])
            got = ours(x).cpu()
            exact = torch.stack([share.double() for share in shares]).sum(0)
            allowed = (
                exact.abs() * torch.finfo(dtype).eps * 0.501
                + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            )
            if dtype == torch.float32:
                allowed *= ours.ranks
            bits = zlib.crc32(got.numpy().tobytes())
            yield int(((got.double() - exact).abs() > allowed).sum()), len(set(gather(bits, ours.ranks))) > 1


def norms(ours: AllReduce, device: torch.device) -> Iterator[tuple[int, bool]]:
    """Numbers that are wrong in all_reduce_rms_norm's residual or result, and whether ranks' bits differ.

    The residual must have the bits of float32's sum and of PyTorch's addition. More: kernels/tools/gpu_check_norm.py's.
    """
    for hidden, rows in ((64, 1), (576, 3), (5120, 1), (5120, 17), (5120, 64), (8192, 64), (16_384, 1), (16_384, 32)):
        shares = [_normal(rows * hidden, torch.float16, hidden + rank).view(rows, hidden) for rank in range(ours.ranks)]
        weight, former = _normal(hidden, torch.float16, 1).to(device), _normal(rows * hidden, torch.float16, 2)
        residual = former.view(rows, hidden).to(device)
        got = ours.rms_norm(shares[ours.rank].to(device), residual, weight, EPS)
        total = torch.zeros(rows, hidden)
        for share in shares:
            total += share
        expected = total.half() + former.view(rows, hidden)
        wide = expected.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()
        wrong = int((residual.cpu() != expected).sum())
        wrong += int(((got.cpu().double() - exact).abs() > exact.abs() * 2.0**-10 * 1.01 + 2.0**-22).sum())
        bits = [zlib.crc32(one.cpu().numpy().tobytes()) for one in (got, residual)]
        yield wrong, len({tuple(one) for one in gather(bits, ours.ranks)}) > 1


def _normal(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gather(value: Any, ranks: int) -> list[Any]:
    """Every rank's value."""
    gathered: list[Any] = [None] * ranks
    distributed.all_gather_object(gathered, value)
    return gathered


def _for_nccl(ours: AllReduce, device: torch.device) -> dict[str, bool]:
    """The tensors that must go to NCCL."""
    two = torch.zeros(64, 2 * HIDDEN, dtype=torch.float16, device=device)
    return {
        "columns of a wider tensor": not ours.takes(two[:, :HIDDEN]),
        "2 bytes off": not ours.takes(two.flatten()[1:9]),
        "int32": not ours.takes(two.int()),
        "one number too many": not ours.takes(torch.zeros(LARGEST // 2 + 1, dtype=torch.float16, device=device)),
    }


def _refused(ours: AllReduce, device: torch.device) -> dict[str, bool]:
    """Bad arguments of the op, each with what its error must say; none of them reaches the GPU."""
    op = torch.ops.voltserve.all_reduce
    to, slots, epochs, rank = ours.places()
    x = torch.zeros(8, HIDDEN, dtype=torch.float16, device=device)
    large = torch.zeros(LARGEST // 2 + 1, dtype=torch.float16, device=device)
    calls = {
        "x: expected Half or Float": lambda: op(x.bfloat16(), to, slots, epochs, rank, 1.0),
        "x: expected contiguous": lambda: op(x[:, :8], to, slots, epochs, rank, 1.0),
        "x: expected a 16-byte boundary": lambda: op(x.flatten()[1:9], to, slots, epochs, rank, 1.0),
        "x: bytes: expected 1 to": lambda: op(large, to, slots, epochs, rank, 1.0),
        "to: expected 1 to 8 addresses": lambda: op(x, [], slots, epochs, rank, 1.0),
        "from_: expected 2 to 8 addresses": lambda: op(x, to, slots[:1], epochs, 0, 1.0),
        "from_: expected multiples of 16": lambda: op(x, to, [slots[0] + 8, slots[1]], epochs, rank, 1.0),
        "epochs: expected": lambda: op(x, to, slots, epochs[1:], rank, 1.0),
        "rank: expected 0 to": lambda: op(x, to, slots, epochs, len(slots), 1.0),
        "limit: expected seconds": lambda: op(x, to, slots, epochs, rank, 0.0),
    }
    return {message: _raises(call, message) for message, call in calls.items()}


def _raises(call: Callable[[], Any], message: str) -> bool:
    try:
        call()
    except RuntimeError as error:
        return message in str(error)
    return False


def _repeats(ours: AllReduce, device: torch.device, repeats: int) -> int:
    """Elements that were wrong in a replayed graph's sums and norms: sizes and numbers change all the time."""
    bad = torch.zeros((), dtype=torch.int64, device=device)
    step = torch.zeros((), dtype=torch.float16, device=device)
    places = [torch.arange(tokens * HIDDEN, device=device) % 61 for tokens in IN_A_GRAPH]
    bases = [place.half() for place in places]
    weight = torch.ones(HIDDEN, dtype=torch.float16, device=device)

    def calls() -> None:
        for base in bases:
            step.add_(1).remainder_(97)
            share = base + (step + 3 * ours.rank)
            got = ours(share)
            expected = ours.ranks * (base + step) + 3 * ours.ranks * (ours.ranks - 1) / 2
            bad.add_((got != expected).sum())
            rows = share.view(-1, HIDDEN)
            if ours.takes_rows(rows):
                residual = torch.ones_like(rows)
                ours.rms_norm(rows, residual, weight, EPS)
                bad.add_((residual.flatten() != expected + 1).sum())

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(repeats // len(bases)):
        graph.replay()
    return int(bad)


def _uneven(ours: AllReduce, device: torch.device) -> int:
    """Elements that were wrong where one rank arrived up to milliseconds after the other."""
    random = torch.Generator().manual_seed(1000 + ours.rank)
    wrong = 0
    for number in range(DELAYS):
        count = HIDDEN * (1, 8, 32)[number % 3]
        torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=random)))
        got = ours(torch.full((count,), float(number % 50 + ours.rank), dtype=torch.float16, device=device))
        expected = ours.ranks * (number % 50) + ours.ranks * (ours.ranks - 1) // 2
        wrong += int((got != expected).sum())
    return wrong


def answer_of_the_dead(ours: AllReduce) -> dict[str, Any]:
    """Rank 0 calls, the others never do: its result, after how long, and what its process reported."""
    ours.limit = DEAD_LIMIT
    distributed.barrier()
    if ours.rank != 0:
        time.sleep(3 * DEAD_LIMIT)
        return {}
    with tempfile.TemporaryFile() as told:
        kept = os.dup(2)
        os.dup2(told.fileno(), 2)
        began, error = time.perf_counter(), ""
        try:
            ours(torch.ones(HIDDEN, dtype=torch.float16, device="cuda"))
            torch.cuda.synchronize()
        except RuntimeError as failure:
            error = str(failure).splitlines()[0]
        seconds = time.perf_counter() - began
        os.dup2(kept, 2)
        told.seek(0)
        lines = [
            line for line in told.read().decode(errors="replace").splitlines() if re.search("all-reduce: rank", line)
        ]
    return {"limit": DEAD_LIMIT, "seconds": round(seconds, 2), "raised": error, "told": lines}
