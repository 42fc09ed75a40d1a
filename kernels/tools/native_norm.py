"""The norm of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY, load
from kernels.tools.native_all_reduce import ReduceArgs


class _NormArgs(ctypes.Structure):
    _fields_ = [
        ("reduce", ReduceArgs),
        *((name, ctypes.c_void_p) for name in ("residual", "weight")),
        *((name, ctypes.c_int) for name in ("rows", "hidden")),
        ("eps", ctypes.c_float),
    ]


class _NormPlan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("vectors", "threads")]


class NormLibrary:
    """The launcher, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = load(path, {"voltserve_norm_structs": (_NormArgs, _NormPlan)})

    def plan(self, rows: int, hidden: int, ranks: int = 1) -> tuple[int, int]:
        """Units of a thread and threads of a block. Raises ValueError naming what does not fit."""
        plan = self._plan(rows, hidden, ranks)
        return plan.vectors, plan.threads

    def _plan(self, rows: int, hidden: int, ranks: int) -> _NormPlan:
        plan, error = _NormPlan(), ctypes.create_string_buffer(256)
        if self._c.voltserve_plan_norm(rows, hidden, ranks, ctypes.byref(plan), error, 256):
            raise ValueError(error.value.decode())
        return plan

    def norm(
        self,
        x: Any,
        residual: Any,
        weight: Any,
        eps: float,
        y: Any,
        places: tuple[list[int], list[int], Any, int] | None = None,
        limit: float = 10.0,
        late: Any = None,
    ) -> Any:
        """A callable that launches it; see all_reduce_rms_norm in kernels/contracts/all_reduce.h, and `places` there.

        All tensors contiguous: x, y and residual (or None) [rows, hidden], weight [hidden], late int32 [1] or None.
        """
        import torch

        args = _NormArgs(weight=weight.data_ptr(), rows=x.shape[0], hidden=x.shape[1], eps=eps)
        args.residual = None if residual is None else residual.data_ptr()
        epochs = None
        if places is not None:
            to, slots, epochs, rank = places
            args.reduce = ReduceArgs.of(to, slots, epochs, rank, limit, late)
        args.reduce.x, args.reduce.y = x.data_ptr(), y.data_ptr()
        plan = self._plan(x.shape[0], x.shape[1], args.reduce.ranks)

        def launch(keep: Any = (x, residual, weight, y, epochs, late)) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := self._c.voltserve_norm(ctypes.byref(args), ctypes.byref(plan), stream):
                raise RuntimeError(f"CUDA error {error} at launch")

        return launch
