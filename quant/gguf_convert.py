"""A Llama-architecture GGUF (github.com/ggml-org/ggml, docs/gguf.md) to a float16 safetensors model directory.

Dequantization is the `gguf` package's. Names, rotary layout and tokenizer are translated here from the file's metadata
rather than by a general loader, so that each field is one that was checked: an unknown one is refused, not dropped.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]

from quant.errors import QuantError
from quant.jsonfile import write_object
from quant.safetensors_file import ShardWriter

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
# Everything that a Llama's metadata may say here; scaled rotary embeddings, for one, would need more than these.
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
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise QuantError(f"{path}: expected a GGUF file, got: {error}", _REMEDY) from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
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
    tensors = {_translated(tensor.name, path): tensor for tensor in reader.tensors}
    tied = "lm_head.weight" not in tensors
    config = _config(fields, tied=tied)
    write_object(out / "config.json", config)
    write_object(out / "generation_config.json", {key: config[key] for key in _TOKEN_IDS})
    _write_tokenizer(fields, config, out)
    specs = {name: (torch.float16, _shape(tensor)) for name, tensor in tensors.items()}
    with ShardWriter(out / "model.safetensors", specs) as writer:
        for name, tensor in tensors.items():
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = "attention.head_count" if name.endswith("q_proj.weight") else "attention.head_count_kv"
                weight = _split_halves(weight, fields[f"llama.{heads}"])
            half = torch.from_numpy(np.array(weight)).to(torch.float16)
            if not half.isfinite().all():
                raise QuantError(f"{path}: {tensor.name}: expected finite float16 values, got NaN or Inf", _REMEDY)
            writer.write(name, half)


def _translated(name: str, path: Path) -> str:
    """The safetensors name of the GGUF tensor `name`, such as blk.3.attn_q.weight."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    block, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or leaf not in PER_LAYER:
        raise QuantError(f"{path}: {name}: expected a Llama tensor, got an unknown name", _REMEDY)
    return f"model.layers.{layer}.{PER_LAYER[leaf]}"


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _split_halves(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from GGUF's interleaved rotary pairs (0, d/2, 1, d/2+1, …) back to two halves (0, 1, …)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


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
        # A float32 in the file: its shortest decimal form is what the model's authors wrote.
        "rms_norm_eps": float(str(np.float32(llama["attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        "tie_word_embeddings": tied,
        **{key: fields[name] for key, name in _TOKEN_IDS.items()},
    }


def _write_tokenizer(fields: Mapping[str, Any], config: Mapping[str, object], out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: byte-level BPE that splits digits one by one.

    Transformers' own GGUF reader loses the digit split and gives the beginning-of-text token as the end-of-text one.
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
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            **{key.removesuffix("_id"): tokens[fields[name]] for key, name in named.items()},
        },
    )
    (out / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
