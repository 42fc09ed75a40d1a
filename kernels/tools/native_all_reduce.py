"""The all-reduce of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY

MAX_RANKS, BLOCKS = 8, 64  # all_reduce_plan.h's


class _Problem(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_size_t), ("ranks", ctypes.c_int), ("over_a_bus", ctypes.c_bool)]


class _Plan(ctypes.Structure):
    _fields_ = [("blocks", ctypes.c_int), ("watch", ctypes.c_int), ("reason", ctypes.c_char_p)]


class _ReduceArgs(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "half", "rank", "ranks", "watch", "copies")),
        ("to", ctypes.c_void_p * MAX_RANKS),
        ("from_", ctypes.c_void_p * MAX_RANKS),
        ("turns", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("late", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Plan:
    """What kernels/cuda/all_reduce_plan.h chose."""

    blocks: int
    watch: bool
    reason: str


class ReduceLibrary:
    """The launcher, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = ctypes.CDLL(str(path))

    def plan(self, size: int, ranks: int = 2, *, over_a_bus: bool = True) -> Plan:
        """The plan for `size` bytes. Raises ValueError naming what does not fit."""
        problem, plan, error = _Problem(size, ranks, over_a_bus), _Plan(), ctypes.create_string_buffer(256)
        if self._c.voltserve_plan_all_reduce(ctypes.byref(problem), ctypes.byref(plan), error, 256):
            raise ValueError(error.value.decode())
        return Plan(plan.blocks, bool(plan.watch), plan.reason.decode())

    def all_reduce(
        self,
        x: Any,
        y: Any,
        to: list[int],
        slots: list[int],
        turns: Any,
        rank: int,
        limit: float,
        blocks: int,
        watch: bool,
    ) -> Any:
        """A callable that launches y = the sum of all ranks' x, in the way given; see kernels/include/all_reduce.h."""
        import torch

        args = _ReduceArgs(x=x.data_ptr(), y=y.data_ptr(), count=x.numel(), half=int(x.element_size() == 2))
        args.rank, args.ranks, args.copies, args.watch = rank, len(slots), len(to), int(watch)
        args.to[: len(to)], args.from_[: len(slots)] = to, slots
        args.turns, args.limit_ns = turns.data_ptr(), int(limit * 1e9)
        plan = _Plan(blocks, int(watch), None)

        def launch(keep: Any = (x, y, turns)) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := self._c.voltserve_all_reduce(ctypes.byref(args), ctypes.byref(plan), stream):
                raise RuntimeError(f"CUDA error {error} at launch")

        return launch
