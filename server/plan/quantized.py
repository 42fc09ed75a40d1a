"""A 16-bit model as `voltserve quantize` would leave it, so that it can be planned before it is made."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from quant.formats.weights import nvfp4
from quant.selection import DEFAULT_IGNORE, select
from server.errors import UserError
from server.plan.model import Linear, Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant.safetensors_file import TensorInfo

GROUP_SIZE = 16


def as_nvfp4(model: Model, ignore: tuple[str, ...] = DEFAULT_IGNORE) -> Model:
    """The model with those linears in NVFP4 that `voltserve quantize` chooses, which reads names and shapes alone.

    Raises:
        UserError: the model is quantized already.
        QuantError: as choosing does.
    """
    if model.linears:
        raise UserError(f"--as nvfp4: expected a 16-bit model, got one with {len(model.linears)} linears in 4 bits")
    # Of a tensor, choosing looks at shape and kind; torch, which TensorInfo's dtype is of, is not loaded here.
    tensors = {
        tensor.name: SimpleNamespace(shape=tensor.shape, dtype=SimpleNamespace(is_floating_point=tensor.floating))
        for tensor in model.plain
    }
    chosen = set(select(cast("Mapping[str, TensorInfo]", tensors), GROUP_SIZE, ignore).linears)
    linears, plain = [], []
    for tensor in model.plain:
        module = tensor.name.removesuffix(".weight")
        if module in chosen and module != tensor.name:
            rows, columns = tensor.shape
            linears.append(Linear(module, rows, columns, nvfp4(GROUP_SIZE)))
        else:
            plain.append(tensor)
    return replace(model, linears=tuple(linears), plain=tuple(plain))
