"""vLLM layers that are loaded from a checkpoint's NVFP4 tensors (lookalikes/linears.py)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import linear

from engine.layers.quantization import QuasarNvfp4Config
from lookalikes.linears import Member
from quant.formats.compressed_tensors import scheme


def config(group_size: int = 16, ignore: tuple[str, ...] = ()) -> QuasarNvfp4Config:
    return QuasarNvfp4Config(scheme(group_size, ignore))


def make(kind: str, *sizes: Any, quant: QuasarNvfp4Config | None = None, **options: Any) -> Any:
    """A layer of class `kind` of vLLM, without bias, named model.layers.0.proj."""
    layer_class = getattr(linear, kind)
    return layer_class(*sizes, bias=False, quant_config=quant or config(), prefix="model.layers.0.proj", **options)


def load(layer: Any, part: Member, *shard: Any) -> None:
    """Gives the layer's weight loaders the tensors of one member, as a model's load_weights does."""
    for name, tensor in part.tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *shard)


def finished_weight(layer: Any) -> torch.Tensor:
    """The matrix [N, K] that the layer multiplies with: what it makes of the identity, transposed."""
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    layer.quant_method.process_weights_after_loading(layer)
    product: torch.Tensor = layer.quant_method.apply(layer, torch.eye(columns))
    return product.T
