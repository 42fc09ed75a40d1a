"""The CUDA kernels' shared library (scripts/build_cuda.sh) through ctypes: tools, benchmarks, tests, with any torch.

The engine calls torch.ops.voltserve. This module reaches the same launchers without it. A machine with another torch
can thus check and time the very same machine code.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kernels.tools.c_structs import digest, filled, struct

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "cuda" / "libvoltserve_cuda.so"
TILE_ROWS, TILE_COLUMNS = 32, 64
_REBUILD = "it was built from other sources: run scripts/build_cuda.sh"


@dataclass(frozen=True)
class Shape:
    """A fused kernel's block: tokens by rows, threads, tiles of 64 columns per stage, blocks that fit a V100's SM."""

    name: str
    tokens: int
    rows: int
    threads: int
    stage_tiles: int
    blocks_per_processor: int


@dataclass(frozen=True)
class Plan:
    """The choice of kernels/cuda/linear/plan.h."""

    path: str
    variant: int
    blocks: int
    tiles: int
    workspace_words: int
    reason: str


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] in the layout of kernels/cuda/common/layout.cuh (FP8: layout8.cuh), as torch tensors on the GPU.

    `experts`: how many matrices, or 0 for one without experts.
    """

    codes: Any
    scales: Any
    row_factor: Any
    n: int
    k: int
    group: int
    experts: int = 0


def load(path: Path) -> ctypes.CDLL:
    """The shared library.

    Raises:
        RuntimeError: the headers that it was compiled with differ from those that c_structs.py reads.
    """
    library = ctypes.CDLL(str(path))
    headers = getattr(library, "voltserve_headers", None)
    if headers is None:
        raise RuntimeError(f"{path}: expected voltserve_headers(), not found; {_REBUILD}")
    headers.restype = ctypes.c_char_p
    if (got := headers().decode()) != (expected := digest()):
        raise RuntimeError(f"{path}: expected headers of sha256 {expected[:12]}…, got {got[:12]}…; {_REBUILD}")
    return library


class Launchers:
    """The library's C functions, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._c = load(path)

    def launch(self, name: str, arguments: ctypes.Structure) -> None:
        """Launches the kernel of `voltserve_NAME`, whose only argument is a struct (`c_structs.filled`).

        The struct has the tensors' addresses: the caller keeps the tensors.
        """
        self._check(self._c[f"voltserve_{name}"](ctypes.byref(arguments), self._stream()))

    @staticmethod
    def _stream() -> ctypes.c_void_p:
        import torch

        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error} at launch")


class Library(Launchers):
    """The linear layer, its weights' layouts, and the yardsticks."""

    def __init__(self, path: Path = LIBRARY) -> None:
        super().__init__(path)
        self._c.voltserve_shape.restype = ctypes.POINTER(struct("Shape"))
        self._c.voltserve_place_code.restype = ctypes.c_uint32
        self._c.voltserve_place_scale.restype = ctypes.c_uint32
        self._c.voltserve_place_fp8.restype = ctypes.c_uint32
        self._c.voltserve_fp8_pair.restype = ctypes.c_uint32

    def shape(self, variant: int) -> Shape | None:
        """The variant's block, or None past the last variant."""
        found = self._c.voltserve_shape(variant)
        if not found:
            return None
        values = {field.name: getattr(found.contents, field.name) for field in fields(Shape)}
        return Shape(**values | {"name": values["name"].decode()})

    def shape_of(self, name: str) -> Shape:
        """The block of the variant of this name. Raises KeyError for an unknown name."""
        shape = self.shape(self.variants()[name])
        if shape is None:
            raise KeyError(name)
        return shape

    def variants(self) -> dict[str, int]:
        """Name to number of every variant."""
        names: dict[str, int] = {}
        while (shape := self.shape(len(names))) is not None:
            names[shape.name] = len(names)
        return names

    def place_code(self, code: int, column: int) -> int:
        """The bits of an E2M1 code in its 32-bit word of the packed layout; `column` 0..7 in the word."""
        placed: int = self._c.voltserve_place_code(code, column)
        return placed

    def place_scale(self, e4m3: int) -> int:
        """The byte of the packed layout for the magnitude of an E4M3 block scale."""
        placed: int = self._c.voltserve_place_scale(e4m3)
        return placed

    def place_fp8(self, code: int, column: int) -> int:
        """The bits of an E4M3 code in its 32-bit word of the packed layout; `column` 0..3 in the word."""
        placed: int = self._c.voltserve_place_fp8(code, column)
        return placed

    def fp8_pair(self, word: int, pair: int) -> int:
        """The bits of a pair's two fp16 numbers, each 2^-8 times its E4M3 code; `pair` 0 or 1 in the word."""
        bits: int = self._c.voltserve_fp8_pair(ctypes.c_uint32(word), pair)
        return bits

    def plan(
        self, m: int, n: int, k: int, group: int = 16, arch: int = 70, processors: int = 80, experts: int = 0
    ) -> Plan:
        """The choice for a problem. Raises ValueError naming what does not fit."""
        plan, error = self._plan(m, n, k, group, arch, processors, experts)
        if error:
            raise ValueError(error)
        values = {field.name: getattr(plan, field.name) for field in fields(Plan)}
        return Plan(**{**values, "path": ("fused", "dequantize")[plan.path], "reason": plan.reason.decode()})

    def _plan(self, m: int, n: int, k: int, group: int, arch: int, processors: int, experts: int) -> tuple[Any, str]:
        plan, error = struct("Plan")(), ctypes.create_string_buffer(256)
        problem = filled("Problem", m=m, n=n, k=k, group=group, arch=arch, processors=processors, experts=experts)
        failed = self._c.voltserve_plan(ctypes.byref(problem), ctypes.byref(plan), error, 256)
        return plan, error.value.decode() if failed else ""

    def pack(self, codes: Any, block_scales: Any, row_factor: Any, group: int) -> Packed:
        """Canonical codes uint8 [n, k/2] and scales (bytes) [n, k/group] on the GPU to the packed layout."""
        import torch

        n, k = codes.shape[0], 2 * codes.shape[1]
        tiles = -(-n // TILE_ROWS) * -(-k // TILE_COLUMNS)
        packed = torch.empty(tiles * TILE_ROWS * TILE_COLUMNS // 2, dtype=torch.uint8, device=codes.device)
        scales = torch.empty(tiles * TILE_ROWS * TILE_COLUMNS // group, dtype=torch.uint8, device=codes.device)
        first_nan = torch.zeros(1, dtype=torch.int32, device=codes.device)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (codes, block_scales, packed, scales, first_nan)]
        self._check(self._c.voltserve_repack(*pointers, n, k, group, self._stream()))
        if found := int(first_nan):
            raise ValueError(f"block_scales: expected numbers, got NaN at {divmod(found - 1, k // group)}")
        return Packed(packed, scales, row_factor, n, k, group)

    def pack_fp8(self, codes: Any, scales: Any, group: int) -> Packed:
        """E4M3 codes [n, k] (bytes) and float32 scales [n, k / group] to the packed layout; group 0 or 128."""
        import torch

        n, k = codes.shape
        rows, tiles = -(-n // TILE_ROWS) * TILE_ROWS, -(-n // TILE_ROWS) * -(-k // TILE_COLUMNS)
        packed = torch.empty(tiles * TILE_ROWS * TILE_COLUMNS, dtype=torch.uint8, device=codes.device)
        factor = torch.empty(rows, dtype=torch.float32, device=codes.device)
        tile_scales = torch.empty(tiles * TILE_ROWS if group else 0, dtype=torch.float16, device=codes.device)
        nan_row = torch.zeros(1, dtype=torch.int32, device=codes.device)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (codes, packed, nan_row)]
        self._check(self._c.voltserve_fp8_repack(*pointers, n, k, self._stream()))
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (scales, factor, tile_scales)]
        self._check(self._c.voltserve_fp8_scales(*pointers, n, k, group, self._stream()))
        if found := int(nan_row):
            raise ValueError(f"codes: expected numbers, got NaN in row {found - 1}")
        return Packed(packed, tile_scales, factor, n, k, group)

    def dequantize(self, w: Packed, out: Any, first_row: int = 0) -> None:
        """Rows first_row .. of w to `out` fp16 [rows, k]."""
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (w.codes, w.scales, w.row_factor, out)]
        self._check(self._c.voltserve_dequantize(*pointers, first_row, out.shape[0], w.k, w.group, self._stream()))

    def linear(
        self,
        x: Any,
        w: Packed,
        y: Any,
        bias: Any = None,
        variant: int | None = None,
        blocks: int | None = None,
        moe: tuple[Any, Any, Any, int] | None = None,
        processors: int | None = None,
        memory_side: bool = False,
    ) -> Any:
        """A callable that launches y = x Wᵀ + bias; `variant` and `blocks` override the plan.

        Allocates the workspace now and nothing later. `memory_side`: memory_side.cu's kernels instead, for the variants
        mma2 and mma8. `moe`: (slots, experts of the token blocks, padded slot count, top_k).
        """
        import torch

        device = torch.cuda.get_device_properties(x.device)
        m = y.shape[0]
        plan, error = self._plan(
            m,
            w.n,
            w.k,
            w.group,
            device.major * 10 + device.minor,
            processors or device.multi_processor_count,
            w.experts,
        )
        if error:
            raise ValueError(error)
        if variant is not None:
            plan.variant = variant
        shape = self.shape(plan.variant)
        if shape is None:
            raise ValueError(f"variant: expected one of {self.variants()}, got {plan.variant}")
        plan.path = 0
        token_blocks = moe[1].shape[0] if moe else -(-m // shape.tokens)
        plan.tiles = -(-w.n // shape.rows) * token_blocks
        plan.blocks = blocks or plan.blocks or device.multi_processor_count  # cuBLAS's path plans none
        words = plan.blocks * 2 * shape.tokens * shape.rows
        workspace = torch.full((words,), -1, dtype=torch.int32, device=x.device)
        slots, experts, padded_slots, top_k = moe or (None, None, None, 0)
        args = filled(
            "LinearArgs",
            x=x, codes=w.codes, scales=w.scales, row_factor=w.row_factor, bias=bias, y=y, workspace=workspace,
            m=m // top_k if top_k else m, n=w.n, k=w.k, x_stride=x.stride(0),
            slots=slots, experts=experts, padded_slots=padded_slots, top_k=top_k,
        )  # fmt: skip

        call = self._c.voltserve_memory_side if memory_side else self._c.voltserve_linear

        def launch(keep: Any = (x, w, bias, y, workspace, moe)) -> None:
            self._check(call(ctypes.byref(args), w.group, ctypes.byref(plan), self._stream()))

        launch.plan = plan  # type: ignore[attr-defined]
        launch.shape = shape  # type: ignore[attr-defined]
        return launch

    def read(self, data: Any, blocks: int, sink: Any) -> None:
        """Reads all of `data` (see read_ceiling.cu)."""
        count = ctypes.c_size_t(data.numel() * data.element_size() // 16)
        pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(sink.data_ptr())
        self._check(self._c.voltserve_read(pointers[0], count, blocks, pointers[1], self._stream()))

    def copy(self, data: Any, to: Any, blocks: int) -> None:
        """Copies all of `data` (see read_ceiling.cu)."""
        count = ctypes.c_size_t(data.numel() * data.element_size() // 16)
        pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(to.data_ptr())
        self._check(self._c.voltserve_copy(pointers[0], pointers[1], count, blocks, self._stream()))
