"""NVFP4 checkpoint tensors of linear layers, their values in float64, and vLLM layers loaded from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers import linear

from engine.layers.quantization import QuasarNvfp4Config
from quant.formats.compressed_tensors import GLOBAL, PACKED, SCALE, scheme

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass
class Member:
    """One linear of a checkpoint: `tensors` by suffix, and `weight` float64 [N, K], which they stand for."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


def member(rows: int, columns: int, divisor: float, group_size: int = 16, seed: int = 0) -> Member:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    # Every E4M3 code but NaN and negative ones.
    scale = torch.randint(0, 0x7F, (rows, columns // group_size), generator=generator, dtype=torch.uint8)
    scale = scale.view(torch.float8_e4m3fn)
    exact = E2M1[codes.long()] * scale.double().repeat_interleave(group_size, dim=1)
    # float32 holds the reciprocal of the divisor: the one rounding that the internal tensor is allowed.
    factor = (1 / torch.tensor([divisor], dtype=torch.float32)).double()
    tensors = {PACKED: codes[:, ::2] | codes[:, 1::2] << 4, SCALE: scale, GLOBAL: torch.tensor([divisor])}
    return Member(tensors, exact * factor)


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


def in_modelopt(part: Member, multiplier: float) -> Member:
    """The codes and scales of `part` under ModelOpt's names, times another factor."""
    names = {PACKED: "weight", SCALE: "weight_scale"}
    tensors = {names[name]: tensor for name, tensor in part.tensors.items() if name in names}
    tensors |= {"weight_scale_2": torch.tensor(multiplier), "input_scale": torch.tensor(3.0)}
    return Member(tensors, part.weight * torch.tensor(multiplier).double())
