"""Embeddings and lm_head on CPUs in the checkpoint's own 16-bit dtype, beside an engine that computes in float32.

vLLM would copy them to float32 at load. The op is `voltserve::linear16`.
"""

from typing import Any, cast

import torch
from torch.nn import Module, Parameter, functional
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from engine import progress
from engine.limits import LINEAR16_MULTIPLE
from engine.ops import kernel_devices


class StoredDtypeEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM's classes are untyped
    """Embeddings and lm_head in the dtype of the checkpoint, for an engine that computes in float32.

    The values are the same. Reading them in 16 bits takes half the traffic: every token reads all of lm_head.
    """

    @staticmethod
    def suits(layer: VocabParallelEmbedding) -> bool:
        """Whether `layer` can use this method: on a CPU, in float32, with a width that the kernel takes."""
        on_cpu = current_platform.device_type == "cpu" and "cpu" in kernel_devices()
        return on_cpu and torch.get_default_dtype() == torch.float32 and layer.embedding_dim % LINEAR16_MULTIPLE == 0

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
        """Makes `weight` [sum(output_partition_sizes), input_size_per_partition]. Loading sets its dtype."""
        load = extra_weight_attrs.pop("weight_loader")

        def load_as_stored(param: Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            if loaded.dtype != param.dtype:
                param.data = torch.empty_like(param, dtype=loaded.dtype)
            load(param, loaded, *shard)

        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, torch.float16, weight_loader=load_as_stored, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Keeps 16-bit weights as they are. vLLM prepares others."""
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
