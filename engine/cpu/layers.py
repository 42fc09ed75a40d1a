"""Layers of vLLM for which voltserve_kernels have a faster CPU implementation, in float32.

On a CPU, vLLM computes norms and activations as chains of elementwise torch operations, and copies 16-bit embeddings to
the engine's float32; a decoding step of a small model is made of just that. Its classes are subclassed and registered
at its own extension point for out-of-tree layers; other dtypes stay with vLLM.
"""

from functools import cache
from typing import Any, cast

import torch
from torch.nn import Module, Parameter, functional
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from engine import progress
from engine.layers.linear import kernel_devices

LINEAR16_COLUMNS = 16  # K of voltserve::linear16 is a multiple of it


class CpuRMSNorm(RMSNorm):  # type: ignore[misc]  # vLLM's classes are untyped
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, of x + residual where a residual is given."""

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., hidden_size]; with a residual also the sum. Both are overwritten then, as by vLLM's CUDA kernel."""
        tensors = (x, self.weight) if residual is None else (x, self.weight, residual)
        if self.variance_size_override is not None or not all(map(_is_plain_float32, tensors)):
            native: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.forward_native(x, residual)
            return native
        if residual is None:
            y: torch.Tensor = torch.ops.voltserve.rms_norm(x, self.weight, self.variance_epsilon)
            return y
        torch.ops.voltserve.add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return x, residual


class CpuSiluAndMul(SiluAndMul):  # type: ignore[misc]  # vLLM's classes are untyped
    """silu(a) * b with x = (a, b)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._forward_method = self.forward_cpu

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 d] to [..., d]."""
        if not _is_plain_float32(x):
            native: torch.Tensor = self.forward_native(x)
            return native
        y: torch.Tensor = torch.ops.voltserve.silu_and_mul(x)
        return y


class StoredDtypeEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM's classes are untyped
    """Embeddings and lm_head in the dtype of the checkpoint, for an engine that computes in float32.

    The values are the same, and in 16 bits reading them is half the work: lm_head is read whole for every token.
    """

    @staticmethod
    def suits(layer: VocabParallelEmbedding) -> bool:
        """Whether `layer`, about to be made, can be kept so: on a CPU, in float32, of a width the kernel takes."""
        on_cpu = current_platform.device_type == "cpu" and "cpu" in kernel_devices()
        return on_cpu and torch.get_default_dtype() == torch.float32 and layer.embedding_dim % LINEAR16_COLUMNS == 0

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Makes `weight` [sum(output_partition_sizes), input_size_per_partition], whose dtype loading will settle."""
        load = extra_weight_attrs.pop("weight_loader")

        def load_as_stored(param: Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            if loaded.dtype != param.dtype:
                param.data = torch.empty_like(param, dtype=loaded.dtype)
            load(param, loaded, *shard)

        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, torch.float16, weight_loader=load_as_stored, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Leaves 16-bit weights as they are; others are vLLM's to prepare."""
        if layer.weight.itemsize == 2:
            stored = str(layer.weight.dtype).removeprefix("torch.")
            progress.decision("embeddings and lm_head", stored, "as stored; read as such, summed in float32")
        else:
            super().process_weights_after_loading(layer)

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x float32 [M, K] to logits float32 [M, N]."""
        if layer.weight.itemsize != 2:
            other: torch.Tensor = super().apply(layer, x, bias)
            return other
        y: torch.Tensor = torch.ops.voltserve.linear16(x.contiguous(), layer.weight)
        return y if bias is None else y + bias

    def embedding(self, layer: Module, input_: torch.Tensor) -> torch.Tensor:
        """Token ids [M] to float32 [M, K]."""
        return functional.embedding(input_, cast(torch.Tensor, layer.weight)).float()


@cache
def register() -> None:
    """Has vLLM make the layers above in place of its own, where voltserve_kernels have code for the CPU; once."""
    if "cpu" not in kernel_devices():
        return
    RMSNorm.register_oot(CpuRMSNorm)
    SiluAndMul.register_oot(CpuSiluAndMul)
    progress.decision("norms and activations", "kernels", "voltserve_kernels have code for the CPU")


def _is_plain_float32(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()
