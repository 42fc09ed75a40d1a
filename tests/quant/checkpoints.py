"""Model directories made byte by byte for tests, without the code under test or the safetensors library."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# name: (dtype as safetensors names it, shape, bytes)
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]
MakeLinear = Callable[[str, int, int], dict[str, Any]]  # name, rows and columns to its tensors


def safetensors_bytes(tensors: Tensors) -> bytes:
    """A safetensors file's bytes, tensors in the given order."""
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path: Path, tensors: Tensors) -> None:
    path.write_bytes(safetensors_bytes(tensors))


# What write_model makes: the shards, of which the second holds this linear.
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DOWN = "model.layers.1.mlp.down_proj"

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 128, 4, 2, 16, 32, 2
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
COMPRESSED_TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}
INDEX = "model.safetensors.index.json"


def compressed_tensors_linear(
    name: str, rows: int, columns: int, group: int = 16, scale: float = 64.0
) -> dict[str, Any]:
    """A linear whose codes count up (code 8, -0, among them) and whose block scales are 1.0."""
    return {
        f"{name}.weight_packed": ("U8", [rows, columns // 2], bytes(n % 256 for n in range(rows * columns // 2))),
        f"{name}.weight_scale": ("F8_E4M3", [rows, columns // group], b"\x38" * (rows * columns // group)),
        f"{name}.weight_global_scale": ("F32", [1], struct.pack("<f", scale)),
    }


def modelopt_linear(name: str, rows: int, columns: int, group: int = 16, scale: float = 1 / 64) -> dict[str, Any]:
    """The same linear as ModelOpt stores it."""
    ours = compressed_tensors_linear(name, rows, columns, group)
    return {
        f"{name}.weight": ours[f"{name}.weight_packed"],
        f"{name}.weight_scale": ours[f"{name}.weight_scale"],
        f"{name}.weight_scale_2": ("F32", [], struct.pack("<f", scale)),
        f"{name}.input_scale": ("F32", [], struct.pack("<f", 0.5)),
    }


def layer(number: int, make_linear: MakeLinear = compressed_tensors_linear) -> dict[str, Any]:
    """The tensors of one decoder layer."""
    prefix = f"model.layers.{number}"
    tensors = {f"{prefix}.input_layernorm.weight": ("BF16", [HIDDEN], b"\x80\x3f" * HIDDEN)}
    for name, (rows, columns) in LINEARS.items():
        tensors |= make_linear(f"{prefix}.{name}", rows, columns)
    return tensors


def embeddings() -> dict[str, Any]:
    shape, raw = [VOCAB, HIDDEN], b"\x80\x3f" * (VOCAB * HIDDEN)
    return {"model.embed_tokens.weight": ("BF16", shape, raw), "lm_head.weight": ("BF16", shape, raw)}


def write_model(
    directory: Path,
    make_linear: MakeLinear = compressed_tensors_linear,
    quantization: object = COMPRESSED_TENSORS,
) -> Path:
    """A whole two-shard Llama; ModelOpt's config goes into its own file."""
    directory.mkdir(exist_ok=True)
    shards = {
        FIRST: embeddings() | layer(0, make_linear),
        SECOND: layer(1, make_linear),
    }
    for name, tensors in shards.items():
        write_safetensors(directory / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    config = dict(CONFIG)
    if quantization is MODELOPT:
        write_json(directory / "hf_quant_config.json", MODELOPT)
    elif quantization is not None:
        config["quantization_config"] = quantization
    write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})
    write_json(directory / "config.json", config)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of two tokens."""
    write_json(directory / "tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})
    write_json(directory / "tokenizer_config.json", {})


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))


def read_json(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def read_shard(path: Path) -> dict[str, Any]:
    """The tensors of a file that `safetensors_bytes` made."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    data = raw[8 + length :]
    header = json.loads(raw[8 : 8 + length])
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }
