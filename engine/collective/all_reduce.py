"""All-reduces of few bytes between the GPUs of one machine, in one kernel (kernels/contracts/all_reduce.h).

Ranks meet in memory that all can read and write: pinned memory of the host, which works without peer-to-peer, or each
other's GPU memory. Imports torch, but not vLLM; importing voltserve_kernels first is the caller's part.
"""

import ctypes
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.reductions import reduce_tensor

from engine.volta import Transport

LIMIT = 120.0  # seconds of waiting for a rank that compiles or loads something; a dead one is found out by then
TRIAL_LIMIT = 5.0
FOLDER = "/dev/shm"  # noqa: S108 - memory, not a temporary file
_DTYPES = (torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes
# Numbers, on both sides of where the kernels change how they send, and counts that fill no line.
TRIED = ((torch.float16, (1, 5120, 30_001, 163_840)), (torch.float32, (3, 5120, 262_144)))
_ROUNDS = 6
TRIED_ROWS, TRIED_HIDDEN = (1, 7, 64), 5120


class AllReduceError(RuntimeError):
    """What a rank could not set up, or got wrong; the same on every rank."""


class AllReduce:
    """The all-reduce of a group's ranks, each a process with a GPU of its own on this machine.

    Calls must be made by all ranks, in the same order, with tensors of the same shape and dtype.
    """

    def __init__(self, group: Any, device: torch.device, transport: Transport) -> None:
        """Sets up the memory with all other ranks.

        Args:
            group: a process group of torch.distributed for CPU tensors; every rank of it must come here.
            device: this rank's GPU.
            transport: where the ranks meet, the same on every rank.

        Raises:
            AllReduceError: a rank could not, or the installed kernels are older than this.
        """
        if not hasattr(torch.ops.voltserve, "all_reduce_rms_norm"):
            raise AllReduceError("voltserve_kernels is older than this: expected all_reduce_rms_norm, not found")
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self.limit = LIMIT
        self._group, self._device = group, device
        self._slot, epochs, self._largest, self._rows = torch.ops.voltserve.all_reduce_layout()
        self._epochs = torch.ones(epochs, dtype=torch.int32, device=device)
        self._to, self._from = self._meet_in_host() if transport == "host memory" else self._meet_in_peers()

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `x` can be given to this; others are for NCCL."""
        return x.dtype in _DTYPES and x.nbytes <= self._largest and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, float16 or float32 of any shape, summed in float32 in the ranks' order."""
        y: torch.Tensor = torch.ops.voltserve.all_reduce(x, *self.places(), self.limit)
        return y

    def takes_rows(self, x: torch.Tensor) -> bool:
        """Whether `rms_norm` can be given `x`."""
        return x.dtype == torch.float16 and x.numel() <= self._rows * x.shape[-1] and self.takes(x)

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """The RMS norm of the sum of all ranks' `x` and of `residual`, which becomes that sum; see all_reduce_rms_norm.

        Args:
            x: float16 [M, hidden], for which `takes_rows` holds.
            residual: float16 [M, hidden], or None.
            weight: float16 [hidden].
            eps: added to the mean of squares.
        """
        op = torch.ops.voltserve.all_reduce_rms_norm
        y: torch.Tensor = op(x, residual, weight, eps, *self.places(), self.limit)
        return y

    def places(self) -> tuple[list[int], list[int], torch.Tensor, int]:
        """The op's arguments to, from_, epochs and rank."""
        return self._to, self._from, self._epochs, self.rank

    def trial(self) -> str:
        """Sums known numbers of all sizes and compares; returns what went wrong on any rank, or "".

        Nothing hangs and no GPU is lost: a rank that does not answer counts as wrong after TRIAL_LIMIT.
        """
        return self._agree(self._try())

    def _try(self) -> str:
        late = torch.zeros(1, dtype=torch.int32, device=self._device)
        for dtype, counts in TRIED:
            for count in counts:
                for seed in range(_ROUNDS):
                    shares = [_numbers(count, dtype, seed * self.ranks + rank) for rank in range(self.ranks)]
                    share = shares[self.rank].to(self._device)
                    got = torch.ops.voltserve.all_reduce(share, *self.places(), TRIAL_LIMIT, late).cpu()
                    if int(late):
                        return f"rank {int(late) - 1} did not answer within {TRIAL_LIMIT:g} s"
                    wrong = int((got != sum(shares)).sum())
                    if wrong:
                        return f"{wrong} of {count} sums of {dtype} were wrong"
        return self._try_norms(late)

    def _try_norms(self, late: torch.Tensor) -> str:
        weight = torch.ones(TRIED_HIDDEN, dtype=torch.float16, device=self._device)
        for rows in TRIED_ROWS:
            shape = rows, TRIED_HIDDEN
            shares = [_numbers(rows * TRIED_HIDDEN, torch.float16, rank).view(shape) for rank in range(self.ranks)]
            residual = torch.ones(shape, dtype=torch.float16, device=self._device)
            arguments = (shares[self.rank].to(self._device), residual, weight, 0.0, *self.places(), TRIAL_LIMIT, late)
            got = torch.ops.voltserve.all_reduce_rms_norm(*arguments).cpu()
            if int(late):
                return f"rank {int(late) - 1} did not answer within {TRIAL_LIMIT:g} s"
            total = torch.stack(shares).float().sum(0) + 1
            expected = total / total.square().mean(-1, keepdim=True).sqrt()
            wrong = int((residual.cpu() != total).sum()) + int(((got - expected).abs() > 2e-3 * expected.abs()).sum())
            if wrong:
                return f"{wrong} numbers of {rows} norms were wrong"
        return ""

    def _meet_in_host(self) -> tuple[list[int], list[int]]:
        """One file of a slot a rank, mapped and pinned by each, without a name once all have it."""
        size = -(-self.ranks * self._slot // mmap.PAGESIZE) * mmap.PAGESIZE
        path, problem, address = "", "", 0
        try:
            if self.rank == 0:
                path = _make_file(size)
        except OSError as error:
            problem = f"{FOLDER}: {error.strerror}, {size} bytes are needed"
        paths = self._gather(path)
        try:
            self._agree(problem, raising=True)
            try:
                self._memory = _map_file(paths[0], size)
                host = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
                address = torch.ops.voltserve.map_host_memory(self._epochs, host, size)
            except (OSError, RuntimeError) as error:
                problem = str(error).splitlines()[0]
            self._agree(problem, raising=True)
        finally:
            if path:
                Path(path).unlink()
        slots = [address + rank * self._slot for rank in range(self.ranks)]
        return [slots[self.rank]], slots

    def _meet_in_peers(self) -> tuple[list[int], list[int]]:
        """Each rank's GPU holds a slot for every rank, which that rank writes."""
        own = torch.zeros(self.ranks * self._slot, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # zeros before anybody writes
        shared = self._gather(reduce_tensor(own))
        problem = ""
        self._memories = [own]
        try:
            for rank, (rebuild, arguments) in enumerate(shared):
                if rank != self.rank:
                    # Opened on this rank's own GPU, which reaches it as a peer: no context on the other is made.
                    self._memories.append(rebuild(*arguments[:6], self._device.index, *arguments[7:]))
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        self._agree(problem, raising=True)
        to = [memory.data_ptr() + self.rank * self._slot for memory in self._memories[1:]]
        return to, [own.data_ptr() + rank * self._slot for rank in range(self.ranks)]

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.ranks
        distributed.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _agree(self, problem: str, *, raising: bool = False) -> str:
        """The first rank's problem, on all ranks."""
        told = [f"rank {rank}: {one}" for rank, one in enumerate(self._gather(problem)) if one]
        if told and raising:
            raise AllReduceError(told[0])
        return told[0] if told else ""


def _make_file(size: int) -> str:
    """A file of zeros in shared memory that this user alone can open. Raises OSError, also where there is no room."""
    descriptor, path = tempfile.mkstemp(prefix="voltserve-all-reduce-", dir=FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, size)  # a file that only grew would kill with SIGBUS where the room ends
    except OSError:
        Path(path).unlink()
        raise
    finally:
        os.close(descriptor)
    return path


def _map_file(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Whole numbers, whose sums float16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 101, (count,), generator=generator).to(dtype)
