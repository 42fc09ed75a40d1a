"""The attention launchers of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY, load

DECODE_TOKENS = 8  # attention/plan.h's kDecodeTokens


def _ints(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class _Problem(ctypes.Structure):
    _fields_ = _ints("requests tokens decode_query_len max_query_len q_heads kv_heads head_dim processors")


class _DecodeShape(ctypes.Structure):
    _fields_ = _ints("head_dim row_warps token_warps blocks_per_processor")


class _PrefillShape(ctypes.Structure):
    _fields_ = _ints("head_dim warps tokens blocks_per_processor")


class _Plan(ctypes.Structure):
    _fields_ = [
        ("decode", _DecodeShape),
        *_ints("splits row_blocks partial_rows"),
        ("partial_floats", ctypes.c_size_t),
        ("arrival_words", ctypes.c_size_t),
        ("prefill", _PrefillShape),
        *_ints("prefill_tiles prefill_shared_bytes"),
        ("reason", ctypes.c_char_p),
    ]


class _AttentionArgs(ctypes.Structure):
    _fields_ = [
        *_pointers("q out k_cache v_cache block_table query_start seq_lens partial arrivals"),
        *_ints("requests q_heads kv_heads head_dim q_stride out_stride table_stride"),
        *_ints("block_size block_chunks token_chunks head_chunks"),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("window", ctypes.c_int),
    ]


class _CacheArgs(ctypes.Structure):
    _fields_ = [
        *_pointers("key value k_cache v_cache slots"),
        *_ints("tokens kv_heads head_dim key_stride value_stride block_size block_chunks token_chunks head_chunks"),
    ]


class _RotateArgs(ctypes.Structure):
    _fields_ = [
        *_pointers("q key value q_weight k_weight positions cos_sin k_cache v_cache slots"),
        *_ints("tokens cached q_heads kv_heads head_dim rotated q_stride key_stride value_stride"),
        *_ints("block_size block_chunks token_chunks head_chunks"),
        ("eps", ctypes.c_float),
        ("halves", ctypes.c_int),
    ]


@dataclass(frozen=True)
class DecodeShape:
    """A decoding block; see kernels/cuda/attention/plan.h."""

    head_dim: int
    row_warps: int
    token_warps: int
    blocks_per_processor: int

    @property
    def rows(self) -> int:
        """Pairs of new token and query head of a block, 8 a warp."""
        return 8 * self.row_warps

    @property
    def tile(self) -> int:
        """Cached tokens of a block at once, 16 a warp."""
        return 16 * self.token_warps


@dataclass(frozen=True)
class Plan:
    """What kernels/cuda/attention/plan.h chose. No `decode`, or 0 `prefill_tiles`: nothing to do."""

    decode: DecodeShape | None
    splits: int
    row_blocks: int
    partial_rows: int
    partial_floats: int
    arrival_words: int
    prefill_rows: int
    prefill_tokens: int
    prefill_blocks_per_processor: int
    prefill_tiles: int
    prefill_shared_bytes: int
    reason: str


class AttentionLibrary:
    """The launchers, on torch tensors of the current device and its current stream."""

    def __init__(self, path: Path = LIBRARY) -> None:
        mirrored = {
            "voltserve_attention_structs": (_Problem, _DecodeShape, _PrefillShape, _Plan, _AttentionArgs),
            "voltserve_cache_structs": (_CacheArgs,),
            "voltserve_rotate_structs": (_RotateArgs,),
        }
        self._c = load(path, mirrored)

    def plan(
        self,
        requests: int,
        tokens: int,
        decode_query_len: int,
        max_query_len: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        processors: int = 80,
    ) -> Plan:
        """The plan of a problem. Raises ValueError naming what does not fit."""
        raw = self._plan(requests, tokens, decode_query_len, max_query_len, q_heads, kv_heads, head_dim, processors)
        decode = DecodeShape(*(getattr(raw.decode, name) for name, _ in _DecodeShape._fields_)) if raw.splits else None
        return Plan(
            decode, raw.splits, raw.row_blocks, raw.partial_rows, raw.partial_floats, raw.arrival_words,
            16 * raw.prefill.warps, raw.prefill.tokens, raw.prefill.blocks_per_processor, raw.prefill_tiles,
            raw.prefill_shared_bytes, raw.reason.decode(),
        )  # fmt: skip

    def _plan(self, *problem: int) -> _Plan:
        plan, error = _Plan(), ctypes.create_string_buffer(256)
        if self._c.voltserve_plan_attention(ctypes.byref(_Problem(*problem)), ctypes.byref(plan), error, 256):
            raise ValueError(error.value.decode())
        return plan

    def attention(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_table: Any,
        query_start: Any,
        seq_lens: Any,
        decode_query_len: int,
        max_query_len: int,
        out: Any,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        processors: int | None = None,
    ) -> Any:
        """A callable that launches torch.ops.voltserve.paged_attention's kernels; tensors as in contracts/attention.h.

        Allocates the scratch memory now and nothing later. `processors`: plan as for a GPU with so many.
        """
        import torch

        processors = processors or torch.cuda.get_device_properties(q.device).multi_processor_count
        tokens, q_heads, head_dim = q.shape
        kv_heads, requests = k_cache.shape[2], seq_lens.shape[0]
        plan = self._plan(
            requests, tokens, decode_query_len, max_query_len, q_heads, kv_heads, head_dim, processors
        )  # fmt: skip
        partial = torch.full((max(1, plan.partial_floats),), torch.nan, device=q.device)
        arrivals = torch.full((max(1, plan.arrival_words),), -1, dtype=torch.int32, device=q.device)
        tensors = (q, out, k_cache, v_cache, block_table, query_start, seq_lens, partial, arrivals)
        args = _AttentionArgs(
            *(t.data_ptr() for t in tensors),
            requests, q_heads, kv_heads, head_dim, q.stride(0), out.stride(0), block_table.stride(0),
            k_cache.shape[1], *(k_cache.stride(d) // 8 for d in range(3)),
            scale, soft_cap, window,
        )  # fmt: skip

        def launch(keep: Any = tensors) -> None:
            self._check(self._c.voltserve_attention(ctypes.byref(args), ctypes.byref(plan), self._stream()))

        return launch

    def reshape_and_cache(self, key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
        """Launches torch.ops.voltserve.reshape_and_cache's kernel."""
        args = _CacheArgs(
            *(t.data_ptr() for t in (key, value, k_cache, v_cache, slots)),
            slots.shape[0], key.shape[1], key.shape[2], key.stride(0), value.stride(0),
            k_cache.shape[1], *(k_cache.stride(d) // 8 for d in range(3)),
        )  # fmt: skip
        self._check(self._c.voltserve_reshape_and_cache(ctypes.byref(args), self._stream()))

    def rotate_and_cache(
        self, q: Any, key: Any, value: Any, positions: Any, cos_sin: Any, halves: bool, q_weight: Any, k_weight: Any,
        eps: float, k_cache: Any, v_cache: Any, slots: Any,
    ) -> None:  # fmt: skip
        """Launches torch.ops.voltserve.rotate_and_cache's kernel."""
        tensors = (q, key, value, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, slots)
        args = _RotateArgs(
            *(None if t is None else t.data_ptr() for t in tensors),
            q.shape[0], slots.shape[0], q.shape[1], key.shape[1], q.shape[2], cos_sin.shape[1],
            *(t.stride(0) for t in (q, key, value)),
            k_cache.shape[1], *(k_cache.stride(d) // 8 for d in range(3)), eps, halves,
        )  # fmt: skip
        self._check(self._c.voltserve_rotate(ctypes.byref(args), self._stream()))

    @staticmethod
    def _stream() -> ctypes.c_void_p:
        import torch

        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error} at launch")
