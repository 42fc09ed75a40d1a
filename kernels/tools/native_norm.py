"""The norm of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.tools.c_structs import filled, struct
from kernels.tools.native import LIBRARY, load
from kernels.tools.native_all_reduce import reduce_args


class NormLibrary:
    """The launcher, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = load(path)

    def plan(self, rows: int, hidden: int, ranks: int = 1) -> tuple[int, int]:
        """Vectors per thread and threads per block. Raises ValueError naming what does not fit."""
        plan = self._plan(rows, hidden, ranks)
        return plan.vectors, plan.threads

    def _plan(self, rows: int, hidden: int, ranks: int) -> Any:
        plan, error = struct("NormPlan")(), ctypes.create_string_buffer(256)
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

        to, slots, epochs, rank = places or ([], [], None, 0)
        args = filled(
            "NormArgs",
            reduce=reduce_args(x, y, to, slots, epochs, rank, limit, late),
            residual=residual, weight=weight, rows=x.shape[0], hidden=x.shape[1], eps=eps,
        )  # fmt: skip
        plan = self._plan(x.shape[0], x.shape[1], len(slots))

        def launch(keep: Any = (x, residual, weight, y, epochs, late)) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := self._c.voltserve_norm(ctypes.byref(args), ctypes.byref(plan), stream):
                raise RuntimeError(f"CUDA error {error} at launch")

        return launch
