"""Attention on CPUs, as vLLM's backend CPU_ATTN.

Few new tokens per request: `torch.ops.voltserve.paged_attention` reads the cache where it lies. Its work is one pass
over a request's cache per token, shared among the threads of our kernels.

Many new tokens: a request's keys and values are gathered, and torch computes attention with matrix multiplications. So
it does for all that the kernel does not compute: 16-bit dtypes, other head sizes, ALiBi, sinks.

The cache of a layer is [blocks, 2, kv heads, block size, D]. A block's keys of one head lie as [D, block size], so that
a vector holds several positions (kernels/contracts/attention.h).

Our kernels have threads of their own (kernels/cpu/pool.h). In a model that runs on them, OpenMP serves only a few small
operations. Starting and joining its threads costs a decoding step more than those operations take.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

# Imported by name, since vLLM's CPU worker later replaces torch's function by one that does nothing.
from torch import set_num_threads
from torch.nn import Module, functional
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from engine import progress
from engine.layers.embedding import StoredDtypeEmbedding
from engine.layers.fp8 import Fp8LinearMethod
from engine.layers.linear import QuasarNvfp4LinearMethod
from engine.limits import DECODER_HEAD_MULTIPLE, DECODER_MAX_HEAD, PAGE_MULTIPLE
from engine.ops import kernel_devices

# The most new tokens of a request that the kernel computes. Beyond, gathering its cache once is faster.
FEW_TOKENS = 16
# Rows of queries that are computed at once where torch's fused attention does not apply.
ROWS = 256

# A larger step uses all OpenMP threads.
ALONE_TOKENS = 16

# torch's number of threads, once a model has been loaded that uses OpenMP only for small operations. Otherwise None.
_threads: int | None = None


def spare_openmp(model: Module) -> None:
    """Makes each step choose its OpenMP threads, if the kernels compute all large layers of `model`."""
    global _threads  # noqa: PLW0603 - torch's own setting is per process, too
    layers = [module for module in model.modules() if isinstance(module, (LinearBase, ParallelLMHead))]
    if layers and all(map(_runs_on_kernels, layers)):
        _threads = torch.get_num_threads()
        progress.decision("OpenMP threads", "1", f"to {ALONE_TOKENS} new tokens per step; {_threads} beyond")


def openmp_threads(tokens: int, threads: int) -> int:
    """How many of `threads` a step with `tokens` new tokens uses."""
    return 1 if tokens <= ALONE_TOKENS else threads


def _runs_on_kernels(layer: Any) -> bool:
    method = layer.quant_method
    if isinstance(method, (QuasarNvfp4LinearMethod, Fp8LinearMethod)):
        return method.route.name == "kernels"
    return isinstance(method, StoredDtypeEmbedding) and layer.weight.itemsize == 2


@dataclass
class Metadata:
    """A step's requests, R of them, for every layer of one kind.

    Attributes:
        num_actual_tokens: T, all new tokens.
        max_query_len: the most new tokens of a request.
        max_seq_len: the most positions of a request, or an upper bound.
        query_start_loc: int32 [R + 1], where a request's new tokens begin.
        seq_lens: int32 [R], positions with the new tokens.
        block_table: int32 [R, any].
        slot_mapping: int64 [T], where each new token's key and value go.
        causal: whether a token sees only those up to its own.
        spans: per request the first of its new tokens, the one after its last, and its positions.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    spans: list[tuple[int, int, int]]


class Backend(AttentionBackend):  # type: ignore[misc]  # vLLM's classes are untyped
    """Attention over a paged cache in the model's dtype."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """vLLM's name for attention on CPUs."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Block sizes whose keys fill whole vectors."""
        return [MultipleOf(PAGE_MULTIPLE)]

    @staticmethod
    def get_impl_cls() -> "type[Attention]":
        """The class of a layer's attention."""
        return Attention

    @staticmethod
    def get_builder_cls() -> "type[Builder]":
        """The builder of each step's metadata."""
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of a layer's cache."""
        return num_blocks, 2, num_kv_heads, block_size, head_size

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, and encoders, whose attention needs no cache."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Attention in both directions."""
        return True


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]  # vLLM's classes are untyped
    """Builds a step's metadata, before the layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # abstract in vLLM

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """Sets the step's OpenMP threads, then builds its metadata."""
        step = common_attn_metadata
        if _threads is not None:
            wanted = openmp_threads(step.num_actual_tokens, _threads)
            if wanted != torch.get_num_threads():
                set_num_threads(wanted)
        if not isinstance(step.causal, bool):
            raise NotImplementedError("attention: expected a step that is causal or not, got one that is both")
        requests = step.num_reqs
        starts, lengths = step.query_start_loc[: requests + 1], step.seq_lens[:requests]
        bounds = starts.tolist()
        return Metadata(
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=step.block_table_tensor[:requests],
            slot_mapping=step.slot_mapping[: step.num_actual_tokens],
            causal=step.causal,
            spans=list(zip(bounds[:-1], bounds[1:], lengths.tolist(), strict=True)),
        )


class Attention(AttentionImpl):  # type: ignore[misc]  # vLLM's classes are untyped
    """One layer's attention: H query heads, H_kv heads of keys and values, of D dimensions each."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window or 0  # 0: all positions
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        if kv_cache_dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise NotImplementedError(
                f"attention: expected a cache in the model's dtype, got {kv_cache_dtype}. "
                "Serve with --kv-cache-dtype auto"
            )
        fits = head_size % DECODER_HEAD_MULTIPLE == 0 and head_size <= DECODER_MAX_HEAD
        self._kernel = fits and alibi_slopes is None and sinks is None and "cpu" in kernel_devices()

    def do_kv_cache_update(
        self,
        layer: Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new tokens' keys and values [T, H_kv, D] to their slots. A negative slot is written nowhere."""
        if self.attn_type != AttentionType.DECODER:
            return
        keys, values = halves(kv_cache)
        if self._uses_kernel(kv_cache):
            torch.ops.voltserve.reshape_and_cache(key, value, keys, values, slot_mapping)
            return
        written = slot_mapping >= 0
        blocks, offsets = slot_mapping[written] // kv_cache.shape[3], slot_mapping[written] % kv_cache.shape[3]
        keys[blocks, :, :, offsets] = key[: len(written)][written].to(keys.dtype)
        values[blocks, :, offsets] = value[: len(written)][written].to(values.dtype)

    def forward(
        self,
        layer: Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of `query` [T, H, D] to `output` [T, H, D], or [T, H D]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention: expected an output that is not quantized")
        step = attn_metadata
        if step is None:  # a step that measures memory or warms up
            return output
        out = output.view(-1, self.num_heads, self.head_size)
        if self.attn_type != AttentionType.DECODER:
            for first, end, _ in step.spans:
                self._attend(query[first:end], key[first:end], value[first:end], False, out[first:end])
            return output
        if self._uses_kernel(kv_cache) and step.causal and step.max_query_len <= FEW_TOKENS:
            self._by_kernel(query[: step.num_actual_tokens], kv_cache, step, out)
            return output
        for request, (first, end, length) in enumerate(step.spans):
            keys, values = gathered(kv_cache, step.block_table[request], length)
            self._attend(query[first:end], keys, values, step.causal, out[first:end])
        return output

    def _uses_kernel(self, kv_cache: torch.Tensor) -> bool:
        return bool(self._kernel and kv_cache.dtype == torch.float32)

    def _by_kernel(self, query: torch.Tensor, kv_cache: torch.Tensor, step: Metadata, out: torch.Tensor) -> None:
        torch.ops.voltserve.paged_attention(
            query,
            *halves(kv_cache),
            step.block_table,
            step.query_start_loc,
            step.seq_lens,
            step.max_query_len,
            step.max_query_len,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            out,
        )

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, out: torch.Tensor) -> None:
        """Attention of one request: q [T, H, D], k and v [S, H_kv, D]. The new tokens are the last ones."""
        queries, keys, values = (tensor.transpose(0, 1) for tensor in (q, k, v))
        plain = self.alibi_slopes is None and self.sinks is None and not self.logits_soft_cap
        tokens, length = len(q), len(k)
        if plain:
            whole = causal and tokens == length and not self.sliding_window
            mask = None if whole else self._seen(0, tokens, tokens, length, causal)
            attended = functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], mask, is_causal=whole, scale=self.scale, enable_gqa=True
            )
            out.copy_(attended[0].transpose(0, 1))
            return
        for begin in range(0, tokens, ROWS):
            rows = slice(begin, min(begin + ROWS, tokens))
            out[rows] = self._explicitly(queries[:, rows], keys, values, rows.start, tokens, causal).transpose(0, 1)

    def _explicitly(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, tokens: int, causal: bool
    ) -> torch.Tensor:
        """As a formula, with soft cap, ALiBi and sinks: softmax over [scores, sink] of the rows from `begin` on."""
        heads, rows, _ = q.shape
        length = k.shape[1]
        group = heads // k.shape[0]
        scores = (q.float() @ k.float().repeat_interleave(group, 0).transpose(1, 2)) * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        if self.alibi_slopes is not None:
            own = torch.arange(length - tokens + begin, length - tokens + begin + rows)
            distance = torch.arange(length)[None] - own[:, None]
            scores += self.alibi_slopes[:, None, None] * distance
        if (seen := self._seen(begin, rows, tokens, length, causal)) is not None:
            scores.masked_fill_(~seen, -math.inf)
        if self.sinks is not None:
            sink = self.sinks.float()[:, None, None].expand(-1, rows, 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v.float().repeat_interleave(group, 0)).to(q.dtype)

    def _seen(self, begin: int, rows: int, tokens: int, length: int, causal: bool) -> torch.Tensor | None:
        """Which positions [rows, length] the new tokens from `begin` on see. None: all."""
        if not causal and not self.sliding_window:
            return None
        own = torch.arange(length - tokens + begin, length - tokens + begin + rows)[:, None]
        position = torch.arange(length)[None]
        seen = position <= own if causal else torch.ones(rows, length, dtype=torch.bool)
        if self.sliding_window:
            seen &= own - position < self.sliding_window
            if not causal:
                seen &= position - own < self.sliding_window
        return seen


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys [blocks, H_kv, D, block size] and values [blocks, H_kv, block size, D], as views of its cache."""
    block_size, dim = kv_cache.shape[3:]
    return kv_cache[:, 0].flatten(2).unflatten(2, (dim, block_size)), kv_cache[:, 1]


def gathered(kv_cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the first `length` keys and values of a request, [length, H_kv, D] each, out of its `blocks`."""
    keys, values = halves(kv_cache)
    own = blocks[: -(-length // kv_cache.shape[3])]
    return keys[own].permute(0, 3, 1, 2).flatten(0, 1)[:length], values[own].transpose(1, 2).flatten(0, 1)[:length]


def register() -> None:
    """Makes vLLM use this backend on CPUs."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")
