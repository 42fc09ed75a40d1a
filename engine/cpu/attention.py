"""vLLM's CPU attention, with the number of OpenMP threads chosen per step.

The kernels have threads of their own (kernels/cpu/pool.h). In a model that runs on them, OpenMP only serves attention
and a few small operations, in three regions per layer. In a decoding step, starting and joining threads costs more than
those regions take. It costs even more if several processes of the engine share the cores.
"""

from typing import Any

import torch

# Imported by name, since vLLM's CPU worker later replaces torch's function by one that does nothing.
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

# A larger step uses all threads. One core reads about 4096 positions of a layer in a few times the time that waking
# another thread takes.
ALONE_TOKENS = 16
ALONE_POSITIONS = 4096

# torch's number of threads, once a model has been loaded that uses OpenMP only for attention. Otherwise None.
_threads: int | None = None


def openmp_threads(tokens: int, positions: int, threads: int) -> int:
    """How many of `threads` a step uses, given its new `tokens` and the `positions` in its requests' caches."""
    return 1 if tokens <= ALONE_TOKENS and positions <= ALONE_POSITIONS else threads


def spare_openmp(model: Module) -> None:
    """Makes each step choose its OpenMP threads, if the kernels compute all large layers of `model`."""
    global _threads  # noqa: PLW0603 - torch's own setting is per process, too
    layers = [module for module in model.modules() if isinstance(module, (LinearBase, ParallelLMHead))]
    if layers and all(map(_runs_on_kernels, layers)):
        _threads = torch.get_num_threads()
        reason = f"to {ALONE_TOKENS} new tokens and {ALONE_POSITIONS} cached ones a step; {_threads} beyond"
        progress.decision("OpenMP threads of attention", "1", reason)


class Backend(CPUAttentionBackend):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's backend with our builder."""

    @staticmethod
    def get_builder_cls() -> "type[Builder]":
        """The builder of each step's metadata."""
        return Builder


class Builder(CPUAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's builder. It is called once per step, before the layers."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Sets the step's threads, then builds its metadata. vLLM splits the work by that number."""
        if _threads is not None:
            tokens, positions = common_attn_metadata.num_actual_tokens, int(common_attn_metadata.seq_lens.sum())
            wanted = openmp_threads(tokens, positions, _threads)
            if wanted != torch.get_num_threads():
                set_num_threads(wanted)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


def register() -> None:
    """Makes vLLM use this backend on CPUs. It behaves as vLLM's until `spare_openmp`."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")


def _runs_on_kernels(layer: Any) -> bool:
    method = layer.quant_method
    if isinstance(method, QuasarNvfp4LinearMethod):
        return method.route.name == "kernels"
    return isinstance(method, StoredDtypeEmbedding) and layer.weight.itemsize == 2
