"""How ranks set up their all-reduce and try it out; sums on GPUs are scripts/gpu_tp2/reduce.py's."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from torch import distributed

from engine.collective import all_reduce
from engine.collective.all_reduce import AllReduce, AllReduceError

LARGEST = torch.ops.voltserve.all_reduce_layout()[2]


def rank_without_a_gpu(rank: int, folder: Path, no_room_on: int | None, told: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    all_reduce.FOLDER = str(folder / "shm")
    if rank == no_room_on:
        all_reduce.FOLDER = str(folder / "missing")
    try:
        AllReduce(distributed.group.WORLD, torch.device("cpu"), "host memory")
    except AllReduceError as error:
        told.put((rank, str(error)))


@pytest.mark.parametrize(
    ("no_room_on", "problem"), [(0, "rank 0: .*missing: No such file"), (None, "rank 0: .*map_host_memory")]
)
def test_what_one_rank_cannot_set_up_every_rank_learns_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_room_on: int | None, problem: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "shm").mkdir()
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(target=rank_without_a_gpu, args=(rank, tmp_path, no_room_on, told)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    errors = dict(told.get(timeout=90) for _ in ranks)
    for process in ranks:
        process.join()
    assert errors[0] == errors[1]
    assert re.search(problem, errors[0])
    assert list((tmp_path / "shm").iterdir()) == []


def test_room_in_shared_memory_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when a page is first touched, which kills where there is none."""
    monkeypatch.setattr(all_reduce, "FOLDER", str(tmp_path))
    path = Path(all_reduce._make_file(1 << 20))
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.stat().st_mode & 0o777 == 0o600
    memory = all_reduce._map_file(str(path), 1 << 20)
    assert memory[:] == bytes(1 << 20)


@pytest.fixture
def rank() -> AllReduce:
    """Rank 0 of 2, set up without the other rank."""
    made = AllReduce.__new__(AllReduce)
    vars(made).update(
        rank=0,
        ranks=2,
        limit=1.0,
        _largest=LARGEST,
        _rows=64,
        _device=torch.device("cpu"),
        _epochs=None,
        _to=[0],
        _from=[0, 0],
    )
    made._gather = lambda value: [value, ""]  # type: ignore[method-assign]
    return made


def test_only_what_the_kernel_reads_is_taken(rank: AllReduce) -> None:
    whole = torch.zeros(64, 2048, dtype=torch.float16)
    assert rank.takes(whole)
    assert rank.takes(whole[1:3])
    assert rank.takes(whole.float())
    assert not rank.takes(whole[:, :1024])
    assert not rank.takes(whole.flatten()[1:9])
    assert not rank.takes(whole.to(torch.bfloat16))
    assert not rank.takes(torch.zeros(LARGEST // 2 + 8, dtype=torch.float16))


def test_a_norm_takes_float16_and_a_row_a_block(rank: AllReduce) -> None:
    whole = torch.zeros(65, 2048, dtype=torch.float16)
    assert rank.takes_rows(whole[:64])
    assert not rank.takes_rows(whole)
    assert not rank.takes_rows(whole[:1].float())
    assert not rank.takes_rows(torch.zeros(64, 16_384, dtype=torch.float16))


Sum = Callable[..., torch.Tensor]


def summing(change: Sum | None = None, late: int = 0) -> Sum:
    """An op that knows the other rank's share, as the trial does."""
    calls = SimpleNamespace(number=0)

    def op(
        x: torch.Tensor, _to: Any, _from: Any, _turns: Any, _rank: int, _limit: float, told: torch.Tensor
    ) -> torch.Tensor:
        seed = calls.number % all_reduce._ROUNDS
        calls.number += 1
        told[0] = late
        other = all_reduce._numbers(x.numel(), x.dtype, seed * 2 + 1)
        return change(x, other) if change else x + other

    return op


def norming(*, off: float = 0.0, summed: bool = True, late: int = 0) -> Sum:
    """As above, of norms."""

    def op(x: torch.Tensor, residual: torch.Tensor, _weight: torch.Tensor, _eps: float, *rest: Any) -> torch.Tensor:
        rest[5][0] = late
        total = x.float() + all_reduce._numbers(x.numel(), x.dtype, 1).view(x.shape) + residual
        if summed:
            residual.copy_(total)
        return (total / total.square().mean(-1, keepdim=True).sqrt() + off).half()

    return op


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (norming(), ""),
        (norming(off=0.1), "rank 0: [0-9]+ numbers of 1 norms were wrong"),
        (norming(summed=False), "rank 0: [0-9]+ numbers of 1 norms were wrong"),
        (norming(late=2), "rank 0: rank 1 did not answer within 5 s"),
    ],
)
def test_the_trial_finds_wrong_norms(rank: AllReduce, monkeypatch: pytest.MonkeyPatch, op: Sum, expected: str) -> None:
    monkeypatch.setattr(torch.ops.voltserve, "all_reduce", summing())
    monkeypatch.setattr(torch.ops.voltserve, "all_reduce_rms_norm", op)
    assert re.fullmatch(expected, rank.trial())


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (summing(), ""),
        (summing(lambda x, other: x + other.roll(1)), "rank 0: .* sums of torch.float16 were wrong"),
        (summing(lambda x, other: torch.cat([(x + other)[:-1], x[-1:] + 999])), "rank 0: 1 of 1 sums of .*"),
        (summing(late=2), "rank 0: rank 1 did not answer within 5 s"),
    ],
)
def test_the_trial_finds_wrong_sums_and_silent_ranks(
    rank: AllReduce, monkeypatch: pytest.MonkeyPatch, op: Sum, expected: str
) -> None:
    monkeypatch.setattr(torch.ops.voltserve, "all_reduce", op)
    monkeypatch.setattr(torch.ops.voltserve, "all_reduce_rms_norm", norming())
    assert re.fullmatch(expected, rank.trial())


@pytest.fixture
def communicator() -> Any:
    from engine.collective import communicator

    return communicator


class Tried:
    """Stands in for AllReduce: what its trial says."""

    problem = ""

    def __init__(self, *_: Any) -> None:
        if self.problem == "raise":
            raise AllReduceError("rank 1: no room")

    def trial(self) -> str:
        return self.problem


@pytest.mark.parametrize(("problem", "kept"), [("", True), ("rank 1: 3 sums were wrong", False), ("raise", False)])
def test_ranks_that_fail_their_trial_keep_nccl_and_say_why(
    communicator: Any, monkeypatch: pytest.MonkeyPatch, problem: str, kept: bool
) -> None:
    told: list[tuple[str, str, str]] = []
    monkeypatch.setattr(communicator.progress, "decision", lambda *choice: told.append(choice))
    monkeypatch.setattr(communicator, "AllReduce", Tried)
    monkeypatch.setattr(Tried, "problem", problem)
    ours = communicator.start(None, torch.device("cpu"), "host memory")
    assert (ours is not None) == kept
    ((what, choice, reason),) = told
    assert (what, choice) == ("all-reduce", "host memory" if kept else "NCCL")
    assert problem.replace("raise", "rank 1: no room") in reason


def test_sums_that_ours_does_not_take_go_to_vllm(communicator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    monkeypatch.setattr(CudaCommunicator, "all_reduce", lambda _self, x: x + 1000)
    made = communicator.VoltaCommunicator.__new__(communicator.VoltaCommunicator)
    made._ours = None
    assert int(made.all_reduce(torch.ones(()))) == 1001
    ours = SimpleNamespace(takes=lambda x: x.dim() == 1)
    made._ours = type("Ours", (), {"takes": staticmethod(ours.takes), "__call__": lambda _self, x: x + 2000})()
    assert int(made.all_reduce(torch.ones(()))) == 1001
    assert int(made.all_reduce(torch.ones(1))) == 2001
