"""vLLM's attention on voltserve_kernels: tensor cores for prompts, and an equal split of the cache for decoding.

It is registered as vLLM's CUSTOM backend. The contract of its two ops is kernels/contracts/attention.h. A step's
metadata consists of tensors that vLLM has on the GPU anyway and of two numbers that the host knows. Captured graphs
need no more.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from engine.limits import DECODE_TOKENS, HEAD_SIZES
from engine.ops import kernel_devices

INSTEAD = "pass --attention-backend TRITON_ATTN"


def available() -> bool:
    """Whether the installed voltserve_kernels has code for GPUs."""
    return "cuda" in kernel_devices()


def register() -> None:
    """Makes this vLLM's CUSTOM backend, for platforms that choose it and users who ask for it."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")


class Backend(AttentionBackend):  # type: ignore[misc]  # vLLM's classes are untyped
    """Causal self-attention over a paged float16 cache."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16"]

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM's registry."""
        name: str = AttentionBackendEnum.CUSTOM.name
        return name

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        """The class of a layer's attention."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        """The builder of each step's metadata."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Multiples of 8, so that a group of 8 positions lies in one block."""
        return [MultipleOf(8)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Blocks come first, so that layers with recurrent states can share them. Keys are [:, 0], values [:, 1]."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Within a cache block, a head's positions are adjacent in memory ("HND").

        A thread block reads one head: 16 positions of 128 dimensions are 4 KiB in a row instead of 16 pieces.
        """
        if include_num_layers_dimension:
            return (1, 0, 2, 4, 3, 5)
        return (0, 1, 3, 2, 4)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """The sizes that kernels are compiled for."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_combination(cls, *_layer: Any) -> str | None:
        """Refuses every layer if the kernels were built without code for GPUs."""
        return None if available() else "the installed voltserve_kernels have no code for GPUs"

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Volta and later. Later GPUs emulate Volta's tensor-core instruction."""
        return bool(capability >= DeviceCapability(7, 0))


@dataclass
class Metadata(AttentionMetadata):  # type: ignore[misc]  # vLLM's classes are untyped
    """One step's batch of R requests; tensors int32 unless stated, on the GPU."""

    num_actual_tokens: int
    decode_query_len: int  # most new tokens among requests with at most DECODE_TOKENS; 0: no such request
    max_query_len: int
    query_start_loc: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R]
    block_table: torch.Tensor  # [R, any]
    slot_mapping: torch.Tensor  # int64 [T]


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]  # vLLM's classes are untyped
    """Reads nothing from the GPU and reorders nothing: each kernel skips the other kernel's requests."""

    # A graph's kernels are chosen on the host at capture. So every batch of a graph must need the same kernels.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """As vLLM calls it."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """The step's metadata.

        Raises:
            NotImplementedError: attention that is not causal.
        """
        common = common_attn_metadata
        if not common.causal:
            raise NotImplementedError(f"attention: expected causal attention, got a batch that is not; {INSTEAD}")
        query_lens = common.query_start_loc_cpu.diff()
        short = query_lens[query_lens <= DECODE_TOKENS]
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            decode_query_len=int(short.max()) if len(short) else 0,
            max_query_len=int(query_lens.max()),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        """The same batch in another group of layers."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class Impl(AttentionImpl[Metadata]):  # type: ignore[misc]  # vLLM's classes are untyped
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **further: Any,
    ) -> None:
        """As vLLM calls it. `further`: options that only some models' layers set.

        Raises:
            NotImplementedError: the layer needs more than causal attention, a window and a soft cap.
        """
        asked = {name: value for name, value in further.items() if value is not None and value is not False}
        if alibi_slopes is not None:
            asked["alibi_slopes"] = alibi_slopes
        if attn_type != AttentionType.DECODER:
            asked["attn_type"] = attn_type
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            asked["kv_cache_dtype"] = kv_cache_dtype
        if asked:
            raise NotImplementedError(
                f"attention: expected a layer with causal attention, a sliding window and a soft cap at most, over a "
                f"float16 cache, got one with {', '.join(sorted(asked))}; {INSTEAD}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window or 0
        self.soft_cap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # The last cache and its two halves, kept since splitting it costs the host as much as a launch.
        self._cache: torch.Tensor | None = None
        self._halves: tuple[torch.Tensor, ...] = ()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `query` [T, H, D] over `kv_cache` (get_kv_cache_shape). Writes and returns `output` [T, H, D].

        Raises:
            NotImplementedError: `output` is missing, or has a scale.
        """
        if output is None or output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention: expected a float16 output to write to, got none or a quantized one")
        if attn_metadata is None:  # vLLM measures the memory of a step that has no requests
            return output.zero_()
        keys, values = self.halves(kv_cache)
        torch.ops.voltserve.paged_attention(
            query,
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.decode_query_len,
            attn_metadata.max_query_len,
            self.scale,
            self.window,
            self.soft_cap,
            output,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes the step's `key` and `value` [T, H_kv, D] to their slots, int64 [at most T]."""
        keys, values = self.halves(kv_cache)
        torch.ops.voltserve.reshape_and_cache(key, value, keys, values, slot_mapping)

    def halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values of `kv_cache` (get_kv_cache_shape), each [blocks, block size, H_kv, D]."""
        if kv_cache is not self._cache:
            self._cache, self._halves = kv_cache, kv_cache.unbind(1)
        return self._halves
