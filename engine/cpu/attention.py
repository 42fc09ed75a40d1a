"""vLLM's CPU attention, with as many OpenMP threads as a step's attention is worth.

The kernels bring threads of their own (kernels/cpu/pool.h). What is left to OpenMP in a model that runs on them is
attention and a few small operations, three regions a layer: in a decoding step, starting and joining threads for them
costs more than they take, the more so where the processes of the engine share the cores.
"""

from typing import Any

import torch

# Bound now: vLLM's CPU worker replaces torch's function by one that does nothing.
from torch import set_num_threads
from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.attention.backends.cpu_attn import (
    CommonAttentionMetadata,
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from engine import progress
from engine.layers.embedding import StoredDtypeEmbedding
from engine.layers.linear import QuasarNvfp4LinearMethod

# Above these a step's attention is shared: one core reads some 4096 positions of one layer in the time that waking
# another takes a few times over.
ALONE_TOKENS = 16
ALONE_POSITIONS = 4096

# What torch is set to when a model that leaves OpenMP to attention has been loaded.
_threads: int | None = None


def openmp_threads(tokens: int, positions: int, threads: int) -> int:
    """How many of `threads` a step uses that has `tokens` new tokens and `positions` in its requests' caches."""
    return 1 if tokens <= ALONE_TOKENS and positions <= ALONE_POSITIONS else threads


def spare_openmp(model: Module) -> None:
    """Has steps choose their OpenMP threads from now on, where the kernels compute all that is large in `model`."""
    global _threads  # noqa: PLW0603 - torch's own setting is the process's, too
    layers = [module for module in model.modules() if isinstance(module, (LinearBase, ParallelLMHead))]
    if layers and all(map(_runs_on_kernels, layers)):
        _threads = torch.get_num_threads()
        reason = f"to {ALONE_TOKENS} new tokens and {ALONE_POSITIONS} cached ones a step; {_threads} beyond"
        progress.decision("OpenMP threads of attention", "1", reason)


class Backend(CPUAttentionBackend):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's, with our builder."""

    @staticmethod
    def get_builder_cls() -> "type[Builder]":
        """The builder of each step's metadata."""
        return Builder


class Builder(CPUAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's, called once a step and before all its layers."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Sets the step's threads, by which vLLM then splits its work."""
        if _threads is not None:
            tokens, positions = common_attn_metadata.num_actual_tokens, int(common_attn_metadata.seq_lens.sum())
            wanted = openmp_threads(tokens, positions, _threads)
            if wanted != torch.get_num_threads():
                set_num_threads(wanted)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


def register() -> None:
    """Has vLLM use this backend for CPUs; it is theirs until `spare_openmp`."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")


def _runs_on_kernels(layer: Any) -> bool:
    method = layer.quant_method
    if isinstance(method, QuasarNvfp4LinearMethod):
        return method.route.name == "kernels"
    return isinstance(method, StoredDtypeEmbedding) and layer.weight.itemsize == 2
