"""What planning needs to know of a model: its shape from config.json, its tensors from the safetensors headers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quant.constants import INDEX_NAME
from quant.errors import QuantError
from quant.formats import fp8
from quant.formats.weights import WeightKind, fp8_kind, nvfp4
from quant.jsonfile import field, optional, read_object
from quant.safetensors_header import Entry, read_header, unindexed_shards
from quant.verify.experts import Experts, read_experts
from server.config.positions import KEY, scaled_positions
from server.errors import UserError

LayerKind = Literal["full", "sliding", "linear"]

_REMEDY = "Restore the model's files from its source"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# The name of the codes in each layout (quant/formats); the block scales are always `weight_scale`.
_CODES = (".weight_packed", ".weight")
_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
# Read and dropped by the engine (activation scales), or never read (draft layers without speculative decoding).
_NOT_LOADED = re.compile(r"(?:^|\.)mtp\.|\.(?:input_global_scale|input_scale)$")


class NotPlannedError(UserError):
    """The model is of a kind whose memory is not computed here; serving it may work."""


@dataclass(frozen=True)
class Linear:
    """A quantized linear [rows, columns]."""

    name: str
    rows: int
    columns: int
    kind: WeightKind


@dataclass(frozen=True)
class Plain:
    """A tensor that is not quantized. `floating` ones take the engine's dtype when loaded."""

    name: str
    shape: tuple[int, ...]
    floating: bool
    nbytes: int


@dataclass(frozen=True)
class LinearAttention:
    """The sizes of Gated-DeltaNet layers; `state_bytes`: of a number of their state, 0 for the engine's dtype's."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_bytes: int


@dataclass(frozen=True)
class Model:
    """A decoder: `kinds` has one entry per layer; `window` is the sliding layers' width in tokens (0 without any).

    `rotary_positions`: rows of the table of cosines and sines. `vision`: it has an image encoder before it.
    `left_out_bytes`: tensors in its files that are not loaded.
    """

    architecture: str
    kinds: tuple[LayerKind, ...]
    hidden: int
    intermediate: int
    experts: Experts | None
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocabulary: int
    positions: int
    rotary_positions: int
    tied: bool
    window: int
    linear_attention: LinearAttention | None
    vision: bool
    linears: tuple[Linear, ...]
    plain: tuple[Plain, ...]
    left_out_bytes: int = 0


def text_only(model: Model) -> Model:
    """The model without its image encoder, as the engine loads it where neither images nor video are served."""
    encoder = [tensor for tensor in model.plain if _is_vision(tensor.name)]
    plain = tuple(tensor for tensor in model.plain if tensor not in encoder)
    return replace(model, vision=False, plain=plain, left_out_bytes=sum(tensor.nbytes for tensor in encoder))


def read_model(directory: Path) -> Model:
    """Reads config.json and the headers of all shards; no weight is read.

    Raises:
        QuantError: a file is missing or broken, or a key is malformed; names it.
        NotPlannedError: a kind of model whose memory is not computed here.
    """
    path = directory / "config.json"
    return describe(read_object(path, _REMEDY), read_entries(directory), str(path))


def read_entries(directory: Path) -> dict[str, Entry]:
    """Every tensor of the model: those of the index's shards, or of all *.safetensors files. Raises QuantError."""
    index = directory / INDEX_NAME
    if index.exists():
        weight_map = field(read_object(index, _REMEDY), "weight_map", dict, str(index), _REMEDY)
        shards = sorted({str(name) for name in weight_map.values()})
    else:
        shards = unindexed_shards(directory)
    if not shards:
        raise QuantError(f"{directory}: expected *.safetensors files, got none", _REMEDY)
    return {name: entry for shard in shards for name, entry in read_header(directory / shard).entries.items()}


def describe(config: Mapping[str, object], entries: Mapping[str, Entry], source: str) -> Model:
    """The model of a config.json (Hugging Face's keys; the text model's where there are several) and its tensors.

    Raises:
        QuantError: names `source` and the key.
        NotPlannedError: a kind of model whose memory is not computed here.
    """
    text = optional(config, "text_config", dict, source, _REMEDY) or config
    architecture = _architecture(config)
    for key, what in (("kv_lora_rank", "multi-head latent attention"), ("is_encoder_decoder", "an encoder")):
        if text.get(key):
            raise NotPlannedError(f"{source}: {architecture} has {what} ({key}), whose memory is not computed here")

    def number(key: str, default: int | None = None) -> int:
        given = optional(text, key, int, source, _REMEDY)
        value = default if given is None else given
        if value is None or value <= 0:
            raise QuantError(f"{source}: {key}: expected a positive number, got {value}", _REMEDY)
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", hidden // heads)
    kinds = _kinds(text, number("num_hidden_layers"), source)
    positions = scaled_positions(text, number(KEY))
    linears, plain = _sort(entries)
    return Model(
        architecture=architecture,
        kinds=kinds,
        hidden=hidden,
        # Mixtures of experts without any dense layer may leave it out.
        intermediate=number("intermediate_size", number("moe_intermediate_size", 4 * hidden)),
        experts=read_experts(text),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * _rotary_factor(text)),
        vocabulary=number("vocab_size"),
        positions=positions,
        rotary_positions=positions * _rotary_tables(text),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        window=number("sliding_window") if "sliding" in kinds else 0,
        linear_attention=_linear_attention(text, source) if "linear" in kinds else None,
        vision=isinstance(config.get("vision_config"), dict),
        linears=linears,
        plain=plain,
    )


def layer_of(name: str) -> int | None:
    """The index of the decoder layer that a tensor or module belongs to."""
    match = _LAYER.search(name)
    return int(match[1]) if match and not _is_vision(name) else None


def _is_vision(name: str) -> bool:
    return "visual" in name or "vision" in name


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"


def _kinds(text: Mapping[str, object], layers: int, source: str) -> tuple[LayerKind, ...]:
    listed = optional(text, "layer_types", list, source, _REMEDY)
    if listed is not None:
        if unknown := sorted({str(kind) for kind in listed if kind not in _KINDS}):
            raise NotPlannedError(f"{source}: layer_types has {', '.join(unknown)}; known: {', '.join(_KINDS)}")
        if len(listed) != layers:
            raise QuantError(f"{source}: layer_types: expected {layers} entries, got {len(listed)}", _REMEDY)
        return tuple(_KINDS[kind] for kind in listed)
    every = optional(text, "full_attention_interval", int, source, _REMEDY)
    if every:
        return tuple("full" if (layer + 1) % every == 0 else "linear" for layer in range(layers))
    # Without `layer_types`, a window holds for all layers, unless Qwen2's switch leaves it off.
    slides = bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False
    return (("sliding" if slides else "full"),) * layers


def _linear_attention(text: Mapping[str, object], source: str) -> LinearAttention:
    def number(key: str) -> int:
        return field(text, f"linear_{key}", int, source, _REMEDY)

    dtype = str(text.get("mamba_ssm_dtype") or "")
    return LinearAttention(
        key_heads=number("num_key_heads"),
        value_heads=number("num_value_heads"),
        key_dim=number("key_head_dim"),
        value_dim=number("value_head_dim"),
        conv_kernel=number("conv_kernel_dim"),
        state_bytes={"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 0),
    )


def _rotary_tables(text: Mapping[str, object]) -> int:
    """Positions in several dimensions (M-RoPE) get a table four times as long (vllm MRotaryEmbedding)."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return 4 if isinstance(rope, dict) and "mrope_section" in rope else 1


def _rotary_factor(text: Mapping[str, object]) -> float:
    rope = text.get("rope_parameters")
    holders: Sequence[Mapping[str, object]] = (rope, text) if isinstance(rope, dict) else (text,)
    for holder in holders:
        factor = holder.get("partial_rotary_factor")
        if isinstance(factor, int | float):
            return float(factor)
    return 1.0


def _sort(entries: Mapping[str, Entry]) -> tuple[tuple[Linear, ...], tuple[Plain, ...]]:
    """Quantized linears, and everything else that is loaded.

    NVFP4 is known by uint8 codes beside float8 block scales, FP8 by float8 weights beside a scale.
    """
    linears: list[Linear] = []
    parts: set[str] = set()
    for name, entry in entries.items():
        if entry.dtype == fp8.ELEMENT and name.endswith(f".{fp8.WEIGHT}") and len(entry.shape) == 2:
            module = name.removesuffix(f".{fp8.WEIGHT}")
            own = [f"{module}.{suffix}" for suffix in fp8.SCALES if f"{module}.{suffix}" in entries]
            kind = fp8_kind(*entry.shape, entries[own[0]].shape) if len(own) == 1 else None
            if kind is not None:
                linears.append(Linear(module, *entry.shape, kind))
                parts |= {name, own[0], f"{module}.{fp8.INPUT_SCALE}"}
            continue
        suffix = next((suffix for suffix in _CODES if name.endswith(suffix)), None)
        if suffix is None or entry.dtype != "U8" or len(entry.shape) != 2:
            continue
        module = name.removesuffix(suffix)
        scale = entries.get(f"{module}.weight_scale")
        if scale is None or scale.dtype != "F8_E4M3" or len(scale.shape) != 2 or not scale.shape[1]:
            continue
        rows, columns = entry.shape[0], 2 * entry.shape[1]
        linears.append(Linear(module, rows, columns, nvfp4(columns // scale.shape[1])))
        parts |= {name, f"{module}.weight_scale", f"{module}.weight_global_scale", f"{module}.weight_scale_2"}
    plain = (
        Plain(name, entry.shape, entry.dtype in {"F64", "F32", "F16", "BF16"}, entry.end - entry.start)
        for name, entry in entries.items()
        if name not in parts and not _NOT_LOADED.search(name)
    )
    return tuple(linears), tuple(plain)
