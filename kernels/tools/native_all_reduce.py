"""The all-reduce of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.tools.c_structs import filled
from kernels.tools.native import LIBRARY, load

# all_reduce/plan.h's.
MAX_RANKS, BLOCKS = 8, 64
EPOCHS = BLOCKS + 1
PLACES = 87_382  # for lines, in each half of a rank's slot
SLOT_BYTES = 2 * PLACES * 16


def reduce_args(
    x: Any,
    y: Any,
    to: list[int],
    slots: list[int],
    epochs: Any,
    rank: int,
    limit: float,
    late: Any = None,
) -> ctypes.Structure:
    """The arguments of a kernel where ranks meet, as the ops' of the same names (kernels/contracts/all_reduce.h).

    Without `slots` there is one rank, and only x and y are used.
    """
    addresses = ctypes.c_void_p * MAX_RANKS
    return filled(
        "ReduceArgs",
        x=x, y=y, count=x.numel(), half=int(x.element_size() == 2), rank=rank, ranks=len(slots), copies=len(to),
        to=addresses(*to), epochs=epochs, limit_ns=int(limit * 1e9), late=late,
        **{"from": addresses(*slots)},
    )  # fmt: skip


class ReduceLibrary:
    """The launcher, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = load(path)

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

        args = reduce_args(x, y, to, slots, epochs, rank, limit)

        def launch(keep: Any = (x, y, epochs)) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := self._c.voltserve_all_reduce(ctypes.byref(args), blocks, stream):
                raise RuntimeError(f"CUDA error {error} at launch")

        return launch
