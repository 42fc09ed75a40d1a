"""Converts a Llama-architecture GGUF (github.com/ggml-org/ggml, docs/gguf.md) to a safetensors model directory.

NVFP4 linears keep their values, in ModelOpt's format, which holds GGUF's multipliers exactly. All other tensors become
float16; the `gguf` package dequantizes them. Names, rotary layout and tokenizer are translated here, from the file's
metadata, not by a general loader. So every field is checked: an unknown one is refused, not dropped.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quant.constants import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG
from quant.errors import QuantError
from quant.formats import gguf_nvfp4, modelopt
from quant.formats.linear import write_linear
from quant.formats.scheme import Scheme
from quant.gguf_file import GgufFile, GgufTensor, open_gguf
from quant.jsonfile import write_object
from quant.safetensors_file import DTYPES, ShardWriter
from quant.tensor import NVFP4Tensor

_REMEDY = "Only SmolLM2-like GGUF files (architecture llama, tokenizer gpt2, pre-tokenizer smollm) are supported"

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# All keys that a Llama's metadata may have here. Scaled rotary embeddings, for example, would need more.
LLAMA_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
)


def convert_gguf(path: Path, out: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files into the folder `out`.

    Raises QuantError naming the file and the field or tensor that is missing or not understood.
    """
    file = open_gguf(path)
    fields: Mapping[str, Any] = file.fields
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
        ("tokenizer.ggml.add_bos_token", False),
        ("tokenizer.ggml.add_space_prefix", False),
    ):
        if (got := fields.get(key)) != expected:
            raise QuantError(f"{path}: {key}: expected {expected!r}, got {got!r}", _REMEDY)
    known = {f"llama.{key}" for key in LLAMA_KEYS}
    present = {name for name in fields if name.startswith("llama.")}
    if different := sorted(known ^ present):
        raise QuantError(f"{path}: {different[0]} is {'missing' if different[0] in known else 'unknown'}", _REMEDY)
    multipliers = {name: tensor for name, tensor in file.tensors.items() if name.endswith((".scale", ".input_scale"))}
    sources = {_translated(name, path): name for name in file.tensors if name not in multipliers}
    quantized = {
        name for name, source in sources.items() if name.startswith("model.layers.") and _is_nvfp4(file, source)
    }
    tied = "lm_head.weight" not in sources
    config = _config(fields, tied=tied)
    if quantized:
        scheme = Scheme(modelopt.NAME, str(path), modelopt.LAYOUT, gguf_nvfp4.GROUP_SIZE, None)
        kept = tuple(sorted(name.removesuffix(".weight") for name in sources if name not in quantized))
        written = modelopt.write(scheme, kept)
        config["quantization_config"] = written.quantization_config
        for name, contents in written.files.items():
            write_object(out / name, contents)
    write_object(out / CONFIG, config)
    write_object(out / GENERATION_CONFIG, {key: config[key] for key in _TOKEN_IDS})
    _write_tokenizer(fields, config, out)
    _write_weights(file, sources, quantized, path, out)


def _write_weights(
    file: GgufFile, sources: Mapping[str, str], quantized: Collection[str], path: Path, out: Path
) -> None:
    """Writes model.safetensors: the tensors `quantized` as they are, others as float16. `sources`: their GGUF names."""
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, source in sources.items():
        shape = file.tensors[source].shape
        if name in quantized:
            parts = modelopt.LAYOUT.parts(shape[0], shape[1], gguf_nvfp4.GROUP_SIZE)
            specs |= {f"{name.removesuffix('.weight')}.{part}": (DTYPES[dtype], size) for part, dtype, size in parts}
        else:
            specs[name] = (torch.float16, shape)
    with ShardWriter(out / "model.safetensors", specs) as writer:
        for name, source in sources.items():
            tensor = file.tensors[source]
            order = _row_order(name, tensor.shape, file.fields)
            if name in quantized:
                matrix = _read_nvfp4(file, source, f"{path}: {source}")
                matrix = NVFP4Tensor(
                    matrix.codes[order],
                    matrix.block_scales.view(torch.uint8)[order].view(torch.float8_e4m3fn),
                    matrix.row_factor,
                    matrix.group_size,
                )
                for part, content in write_linear(modelopt.LAYOUT, matrix, name).items():
                    writer.write(f"{name.removesuffix('.weight')}.{part}", content)
                continue
            if tensor.type == gguf_nvfp4.TENSOR_TYPE:
                values = _read_nvfp4(file, source, f"{path}: {source}").dequantize()
            else:
                values = torch.from_numpy(np.array(_dequantized(tensor, f"{path}: {source}")))
            half = values[order].to(torch.float16)
            if not half.isfinite().all():
                raise QuantError(f"{path}: {source}: expected finite float16 values, got NaN or Inf", _REMEDY)
            writer.write(name, half)


def _is_nvfp4(file: GgufFile, name: str) -> bool:
    return file.tensors[name].type == gguf_nvfp4.TENSOR_TYPE


def _read_nvfp4(file: GgufFile, name: str, where: str) -> NVFP4Tensor:
    tensor = file.tensors[name]
    scale = file.tensors.get(f"{name.removesuffix('.weight')}.scale")
    if scale is not None and (scale.type != gguf.GGMLQuantizationType.F32 or scale.data.size != 4):
        raise QuantError(f"{where}: expected one float32 as its scale, got shape {list(scale.shape)}", _REMEDY)
    multiplier = 1.0 if scale is None else float(scale.dequantize().reshape(-1)[0])
    return gguf_nvfp4.read_matrix(torch.from_numpy(np.array(tensor.data)), tensor.shape[-1], multiplier, where)


def _dequantized(tensor: GgufTensor, where: str) -> npt.NDArray[np.float32]:
    try:
        return tensor.dequantize()
    except NotImplementedError as error:
        raise QuantError(f"{where}: expected a type that can be decoded, got {error}", _REMEDY) from None


def _row_order(name: str, shape: tuple[int, ...], fields: Mapping[str, Any]) -> torch.Tensor:
    """The source's row for each row. Query and key rows are in GGUF's rotary order; all others keep their place."""
    rows: npt.NDArray[np.int64] = np.arange(shape[0])
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = "attention.head_count" if name.endswith("q_proj.weight") else "attention.head_count_kv"
        rows = _split_halves(rows, fields[f"llama.{heads}"])
    return torch.from_numpy(rows)


def _translated(name: str, path: Path) -> str:
    """The safetensors name of the GGUF tensor `name`, such as blk.3.attn_q.weight."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    block, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or leaf not in PER_LAYER:
        raise QuantError(f"{path}: {name}: expected a Llama tensor, got an unknown name", _REMEDY)
    return f"model.layers.{layer}.{PER_LAYER[leaf]}"


def _split_halves(rows: npt.NDArray[np.int64], heads: int) -> npt.NDArray[np.int64]:
    """Rows of each head from GGUF's interleaved rotary pairs (0, d/2, 1, d/2+1, …) back to two halves (0, 1, …)."""
    return rows.reshape(heads, len(rows) // heads // 2, 2).swapaxes(1, 2).reshape(-1)


_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def _config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, object]:
    llama = {key: fields[f"llama.{key}"] for key in LLAMA_KEYS}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "hidden_act": "silu",
        # A float32 in the file. Its shortest decimal form is the number that the model's authors wrote.
        "rms_norm_eps": float(str(np.float32(llama["attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        "tie_word_embeddings": tied,
        **{key: fields[name] for key, name in _TOKEN_IDS.items()},
    }


def _write_tokenizer(fields: Mapping[str, Any], config: Mapping[str, object], out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: byte-level BPE that splits digits one by one.

    Transformers' own GGUF reader loses the digit split, and confuses the tokens for beginning and end of text.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {**_TOKEN_IDS, "unk_token_id": "tokenizer.ggml.unknown_token_id"}
    write_object(
        out / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            **{key.removesuffix("_id"): tokens[fields[name]] for key, name in named.items()},
        },
    )
    (out / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
