"""The plain layers of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.tools.c_structs import filled
from kernels.tools.native import LIBRARY, load


class PlainLibrary:
    """The launchers, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = load(path)

    def norm(self, x: Any, residual: Any, weight: Any, eps: float, y: Any) -> None:
        """y = norm(x) weight. x [T, heads, D] with any strides of tokens and heads; y, and residual or None, dense."""
        tokens, heads, width = x.shape
        args = filled(
            "PlainNormArgs",
            x=x,
            weight=weight,
            residual=residual,
            y=y,
            eps=eps,
            rows=tokens * heads,
            x_token=x.stride(0),
            x_head=x.stride(1),
            heads=heads,
            width=width,
        )
        self._check(self._c.voltserve_plain_norm(ctypes.byref(args), self._stream()))

    def rotate(self, positions: Any, x: Any, cos_sin: Any, *, halves: bool) -> None:
        """Rotates x [T, heads, D] in place by cos_sin [any, rotated] at positions int64 [T]."""
        args = filled(
            "PlainRotaryArgs",
            positions=positions,
            cos_sin=cos_sin,
            x=x,
            tokens=x.shape[0],
            x_token=x.stride(0),
            x_head=x.stride(1),
            heads=x.shape[1],
            rotated=cos_sin.shape[1],
            halves=halves,
        )
        self._check(self._c.voltserve_plain_rotary(ctypes.byref(args), self._stream()))

    @staticmethod
    def _stream() -> ctypes.c_void_p:
        import torch

        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error} at launch")
