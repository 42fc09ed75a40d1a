"""The all-reduce of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY, load

# all_reduce/plan.h's.
MAX_RANKS, BLOCKS = 8, 64
EPOCHS = BLOCKS + 1
PLACES = 87_382  # for lines, in each half of a rank's slot
SLOT_BYTES = 2 * PLACES * 16


class ReduceArgs(ctypes.Structure):
    """The arguments of a kernel where ranks meet (kernels/cuda/all_reduce/args.h)."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "half", "rank", "ranks", "copies")),
        ("to", ctypes.c_void_p * MAX_RANKS),
        ("from_", ctypes.c_void_p * MAX_RANKS),
        ("epochs", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("late", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, to: list[int], slots: list[int], epochs: Any, rank: int, limit: float, late: Any = None) -> ReduceArgs:
        """All of them but the numbers, as the ops' arguments of the same names (kernels/contracts/all_reduce.h)."""
        args = cls(rank=rank, ranks=len(slots), copies=len(to), epochs=epochs.data_ptr(), limit_ns=int(limit * 1e9))
        args.to[: len(to)], args.from_[: len(slots)] = to, slots
        args.late = None if late is None else late.data_ptr()
        return args


class ReduceLibrary:
    """The launcher, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = load(path, {"voltserve_all_reduce_structs": (ReduceArgs,)})

    def plan(self, count: int, ranks: int = 2, *, half: bool = True) -> int:
        """The blocks for `count` numbers, float16 or float32. Raises ValueError naming what does not fit."""
        blocks, error = ctypes.c_int(), ctypes.create_string_buffer(256)
        if self._c.voltserve_plan_all_reduce(ctypes.c_size_t(count), half, ranks, ctypes.byref(blocks), error, 256):
            raise ValueError(error.value.decode())
        return blocks.value

    def all_reduce(
        self,
        x: Any,
        y: Any,
        to: list[int],
        slots: list[int],
        epochs: Any,
        rank: int,
        limit: float,
        blocks: int,
    ) -> Any:
        """A callable that launches y = the sum of all ranks' x on `blocks` blocks (kernels/contracts/all_reduce.h)."""
        import torch

        args = ReduceArgs.of(to, slots, epochs, rank, limit)
        args.x, args.y, args.count, args.half = x.data_ptr(), y.data_ptr(), x.numel(), int(x.element_size() == 2)

        def launch(keep: Any = (x, y, epochs)) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := self._c.voltserve_all_reduce(ctypes.byref(args), blocks, stream):
                raise RuntimeError(f"CUDA error {error} at launch")

        return launch
