"""Small look-alikes of checkpoints that people download: true config shapes and tensor names, made-up weights."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.quant.checkpoints import (
    CONFIG,
    FFN,
    HIDDEN,
    LINEARS,
    VOCAB,
    compressed_tensors_linear,
    modelopt_linear,
    write_json,
    write_safetensors,
    write_tokenizer,
)

MakeLinear = Callable[[str, int, int], dict[str, Any]]
EXPERTS = 2


def half(name: str, rows: int, columns: int) -> dict[str, Any]:
    return {f"{name}.weight": ("BF16", [rows, columns], b"\x80\x3f" * (rows * columns))}


def fp8(name: str, rows: int, columns: int) -> dict[str, Any]:
    one = ("F32", [1], struct.pack("<f", 1.0))
    return {f"{name}.weight": ("F8_E4M3", [rows, columns], b"\x38" * (rows * columns)), f"{name}.weight_scale": one}


def experts(
    names: tuple[str, ...], make: MakeLinear, parent: str = "mlp.experts"
) -> dict[str, tuple[int, int, MakeLinear]]:
    """Linears of a layer's experts; the second name is that of the down projection."""
    return {
        f"{parent}.{number}.{name}": ((HIDDEN, FFN, make) if name == names[1] else (FFN, HIDDEN, make))
        for number in range(EXPERTS)
        for name in names
    }


def write(
    directory: Path,
    architecture: str,
    quantization: Mapping[str, Any] | None,
    *,
    attention: MakeLinear = compressed_tensors_linear,
    mlp: MakeLinear = compressed_tensors_linear,
    head: MakeLinear = half,
    more: Mapping[str, tuple[int, int, MakeLinear]] | None = None,
    extra: Mapping[str, Any] | None = None,
    nested: bool = False,
    config: Mapping[str, Any] | None = None,
    prefix: str = "model",
) -> Path:
    """A directory of two layers. `more`: linears of each layer in place of its MLP's; `extra`: tensors as they are."""
    directory.mkdir()
    tensors = {**half(f"{prefix}.embed_tokens", VOCAB, HIDDEN), **head("lm_head", VOCAB, HIDDEN), **(extra or {})}
    for number in range(2):
        layer = f"{prefix}.layers.{number}"
        tensors[f"{layer}.input_layernorm.weight"] = ("BF16", [HIDDEN], b"\x80\x3f" * HIDDEN)
        linears = {name: (*size, attention if "attn" in name else mlp) for name, size in LINEARS.items()}
        if more is not None:
            linears = {name: linear for name, linear in linears.items() if "attn" in name} | dict(more)
        for name, (rows, columns, make) in linears.items():
            tensors |= make(f"{layer}.{name}", rows, columns)
    write_safetensors(directory / "model.safetensors", tensors)
    sizes = {**CONFIG, "hidden_act": "silu", "max_position_embeddings": 4096, **(config or {})}
    for key in ("architectures", "model_type"):
        sizes.pop(key)
    declared: dict[str, Any] = {"architectures": [architecture], **({"text_config": sizes} if nested else sizes)}
    if quantization is not None:
        declared["quantization_config"] = dict(quantization)
    write_json(directory / "config.json", declared)
    write_tokenizer(directory)
    return directory


__all__ = ["compressed_tensors_linear", "experts", "fp8", "half", "modelopt_linear", "write"]
