"""The attention launchers of the CUDA kernels' shared library through ctypes, beside kernels/tools/native.py's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

from kernels.tools.c_structs import filled, struct
from kernels.tools.native import Launchers

DECODE_TOKENS = 8  # attention/plan.h's kDecodeTokens


@dataclass(frozen=True)
class DecodeShape:
    """A decoding block; see kernels/cuda/attention/plan.h."""

    head_dim: int
    row_warps: int
    token_warps: int
    blocks_per_processor: int

    @property
    def rows(self) -> int:
        """Pairs of new token and query head per block, 8 per warp."""
        return 8 * self.row_warps

    @property
    def tile(self) -> int:
        """Cached tokens of a block at once, 16 per warp."""
        return 16 * self.token_warps


@dataclass(frozen=True)
class Plan:
    """The choice of kernels/cuda/attention/plan.h. No `decode`, or 0 `prefill_tiles`: nothing to do."""

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


def _cache(k_cache: Any, v_cache: Any) -> dict[str, Any]:
    """The caches' fields, which three structs share; strides in chunks of 16 bytes."""
    strides = ("block_chunks", "token_chunks", "head_chunks")
    return {
        "k_cache": k_cache, "v_cache": v_cache, "block_size": k_cache.shape[1],
        **{name: k_cache.stride(dimension) // 8 for dimension, name in enumerate(strides)},
    }  # fmt: skip


class AttentionLibrary(Launchers):
    """Attention, and the updates of its cache."""

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
        decode = DecodeShape(*(getattr(raw.decode, field.name) for field in fields(DecodeShape)))
        return Plan(
            decode if raw.splits else None, raw.splits, raw.row_blocks, raw.partial_rows, raw.partial_floats,
            raw.arrival_words, 16 * raw.prefill.warps, raw.prefill.tokens, raw.prefill.blocks_per_processor,
            raw.prefill_tiles, raw.prefill_shared_bytes, raw.reason.decode(),
        )  # fmt: skip

    def _plan(
        self, requests: int, tokens: int, decode_query_len: int, max_query_len: int, q_heads: int, kv_heads: int,
        head_dim: int, processors: int,
    ) -> Any:  # fmt: skip
        plan, error = struct("AttentionPlan")(), ctypes.create_string_buffer(256)
        problem = filled(
            "AttentionProblem", requests=requests, tokens=tokens, decode_query_len=decode_query_len,
            max_query_len=max_query_len, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, processors=processors,
        )  # fmt: skip
        if self._c.voltserve_plan_attention(ctypes.byref(problem), ctypes.byref(plan), error, 256):
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

        Allocates the scratch memory now and nothing later. `processors`: the plan is for a GPU with that many.
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
        args = filled(
            "AttentionArgs",
            q=q, out=out, block_table=block_table, query_start=query_start, seq_lens=seq_lens, partial=partial,
            arrivals=arrivals, requests=requests, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
            q_stride=q.stride(0), out_stride=out.stride(0), table_stride=block_table.stride(0), scale=scale,
            soft_cap=soft_cap, window=window, **_cache(k_cache, v_cache),
        )  # fmt: skip
        tensors = (q, out, k_cache, v_cache, block_table, query_start, seq_lens, partial, arrivals)

        def launch(keep: Any = tensors) -> None:
            self._check(self._c.voltserve_attention(ctypes.byref(args), ctypes.byref(plan), self._stream()))

        return launch

    def reshape_and_cache(self, key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
        """Launches torch.ops.voltserve.reshape_and_cache's kernel."""
        args = filled(
            "CacheArgs",
            key=key, value=value, slots=slots, tokens=slots.shape[0], kv_heads=key.shape[1], head_dim=key.shape[2],
            key_stride=key.stride(0), value_stride=value.stride(0), **_cache(k_cache, v_cache),
        )  # fmt: skip
        self.launch("reshape_and_cache", args)

    def rotate_and_cache(
        self, q: Any, key: Any, value: Any, positions: Any, cos_sin: Any, halves: bool, q_weight: Any, k_weight: Any,
        eps: float, k_cache: Any, v_cache: Any, slots: Any,
    ) -> None:  # fmt: skip
        """Launches torch.ops.voltserve.rotate_and_cache's kernel."""
        args = filled(
            "RotateArgs",
            q=q, key=key, value=value, q_weight=q_weight, k_weight=k_weight, positions=positions, cos_sin=cos_sin,
            slots=slots, tokens=q.shape[0], cached=slots.shape[0], q_heads=q.shape[1], kv_heads=key.shape[1],
            head_dim=q.shape[2], rotated=cos_sin.shape[1], q_stride=q.stride(0), key_stride=key.stride(0),
            value_stride=value.stride(0), eps=eps, halves=halves, **_cache(k_cache, v_cache),
        )  # fmt: skip
        self.launch("rotate", args)
