"""Small random NVFP4 and FP8 models in every format, of awkward widths, beside their dequantized twins.

Widths are multiples of the group size and of little else: N not of 32, fewer key/value heads than ranks, a vocabulary
that needs padding; every linear has a global scale of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookalikes.auto_round import CONFIG as AUTO_ROUND
from lookalikes.linears import Member, fp8_member, in_modelopt, member
from quant.formats import compressed_tensors, fp8, modelopt, quantize_config

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS, EXPERTS, TOP_K = 6, 1, 32, 260, 2, 6, 2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """A decoder: what config.json adds to the common sizes, and its MLP's linears by (N, K) in units of the sizes."""

    name: str
    model_type: str
    config: dict[str, object]
    mlp: Callable[[int, int], dict[str, tuple[int, int]]]
    router: str = ""


def _dense(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    return {
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def _experts(prefix: str, gate: str, up: str, down: str) -> Callable[[int, int], dict[str, tuple[int, int]]]:
    def linears(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
        shapes = {gate: (intermediate, hidden), up: (intermediate, hidden), down: (hidden, intermediate)}
        return {f"{prefix}.{number}.{leaf}": shape for number in range(EXPERTS) for leaf, shape in shapes.items()}

    return linears


QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", {}, _dense)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "mlp_only_layers": []},
    _experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mlp.gate",
)
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    _experts("block_sparse_moe.experts", "w1", "w3", "w2"),
    "block_sparse_moe.gate",
)


@dataclass(frozen=True)
class Format:
    """How a model is stored: a linear's tensors made of compressed-tensors', and what the configs say."""

    group_size: int
    linear: Callable[[Member, int], Member]
    in_config: dict[str, object] | None = None
    files: Callable[[Path], None] = lambda _directory: None
    pre_quant_scale: bool = False
    quantization: str = ""  # for --quantization, where the files say it to us but not to vLLM
    eights: Callable[[str], str] = lambda _name: ""  # the kind of scales of a linear in FP8, by its name; "" for NVFP4
    fp8_scale: str = fp8.SCALES[0]
    quantized_head: bool = False


def _modelopt(part: Member, seed: int) -> Member:
    unscaled = replace(part, weight=part.weight * part.tensors[compressed_tensors.GLOBAL].double())
    return in_modelopt(unscaled, 3e-4 + 7e-6 * seed)


def _kept(router: str) -> tuple[str, ...]:
    return ("lm_head", *([f"re:.*{router}$"] if router else []))


def formats(router: str) -> dict[str, Format]:
    """Every format that is read, for a model whose router is called `router`."""
    unchanged: Callable[[Member, int], Member] = lambda part, _seed: part  # noqa: E731
    wildcards = ["lm_head", *([f"*.{router}"] if router else [])]

    def modelopt_file(algorithm: str) -> Callable[[Path], None]:
        quantization = {"quant_algo": algorithm, "group_size": 16, "exclude_modules": wildcards}
        data = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}
        return lambda directory: _write_json(directory / modelopt.FILE_NAME, data)

    def quasar_file(directory: Path) -> None:
        quantize_config.write(directory, quantize_config.QuantizeConfig(32, "maxabs"))

    return {
        "compressed-tensors": Format(16, unchanged, compressed_tensors.write_config(16, _kept(router))),
        "modelopt": Format(16, _modelopt, files=modelopt_file("NVFP4")),
        "modelopt AWQ": Format(16, _modelopt, files=modelopt_file("NVFP4_AWQ"), pre_quant_scale=True),
        "auto-round": Format(16, unchanged, AUTO_ROUND),
        "quasarnvfp4": Format(32, unchanged, files=quasar_file, quantization=quantize_config.NAME),
    }


def fp8_formats() -> dict[str, Format]:
    """NVFP4 MLPs beside FP8 attention, as two tools write them, and whole models in FP8; two with quantized heads."""
    unchanged: Callable[[Member, int], Member] = lambda part, _seed: part  # noqa: E731
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    said = {"format": "float-quantized", "weights": weights, "input_activations": activations}
    fours = compressed_tensors.write_config(16, ())
    groups: Any = fours["config_groups"]
    two = {
        "group_0": groups["group_0"] | {"format": compressed_tensors.PACKING, "targets": ["re:.*mlp.*"]},
        "group_1": said | {"targets": ["re:.*self_attn.*"]},
    }
    layers = {
        f"model.layers.{layer}.{name}": {"quant_algo": algorithm} | ({"group_size": 16} if "NV" in algorithm else {})
        for layer in range(LAYERS)
        for name, algorithm in (
            *((f"self_attn.{leaf}_proj", "FP8") for leaf in "qkvo"),
            *((f"mlp.{leaf}_proj", "W4A16_NVFP4") for leaf in ("gate", "up", "down")),
        )
    }
    layers["lm_head"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": []}
    data = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": quantization}

    def attention_in(kind: str) -> Callable[[str], str]:
        return lambda name: kind if "self_attn" in name else ""

    def modelopt_file(directory: Path) -> None:
        _write_json(directory / modelopt.FILE_NAME, data)

    blocks: dict[str, object] = {
        "quant_method": fp8.NAME,
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    mixed = fours | {"format": compressed_tensors.MIXED, "config_groups": two, "ignore": ["lm_head"]}
    tensor: dict[str, object] = fours | {
        "format": compressed_tensors.FLOAT,
        "config_groups": {"group_0": said | {"targets": ["Linear"], "weights": weights | {"strategy": "tensor"}}},
        "ignore": [],
    }
    return {
        "compressed-tensors mixed": Format(16, unchanged, mixed, eights=attention_in("channel")),
        "modelopt mixed": Format(
            16, _modelopt, files=modelopt_file, eights=attention_in("tensor"), quantized_head=True
        ),
        "fp8 blocks": Format(32, unchanged, blocks, eights=lambda _name: "block", fp8_scale=fp8.SCALES[1]),
        "compressed-tensors fp8": Format(16, unchanged, tensor, eights=lambda _name: "tensor", quantized_head=True),
    }


def write_model(
    directory: Path, twin: Path, architecture: Architecture, form: str, seed: int = 0, head_dim: int = HEAD_DIM
) -> None:
    """Writes the quantized model into `directory` and its weights in float32 into `twin`, under the same names."""
    stored_as = (formats(architecture.router) | fp8_formats())[form]
    group = stored_as.group_size
    hidden, intermediate = 5 * group, 10 * group  # a rank of two gets 5 groups of an MLP, and of the hidden width all
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
    shapes = {f"self_attn.{name}": (count * head_dim, hidden) for name, count in heads.items()}
    shapes |= {"self_attn.o_proj": (hidden, HEADS * head_dim)} | architecture.mlp(hidden, intermediate)
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return std * torch.randn(shape, generator=random)

    # Logits far apart, so that the last bits of an addition cannot turn a greedy choice.
    plain: Tensors = {"model.embed_tokens.weight": normal(VOCABULARY, hidden), "model.norm.weight": torch.ones(hidden)}
    plain["lm_head.weight"] = normal(VOCABULARY, hidden, std=0.3)
    quantized: Tensors = {}
    values: Tensors = {}

    def store(name: str, rows: int, columns: int, unit: int) -> Member:
        if kind := stored_as.eights(name):
            return fp8_member(rows, columns, kind, stored_as.fp8_scale, unit)
        return stored_as.linear(member(rows, columns, 3000.0 + 70.0 * unit, group, unit), unit)

    if stored_as.quantized_head:
        del plain["lm_head.weight"]
        head = store("lm_head", VOCABULARY, hidden, seed + 1000)
        quantized |= {f"lm_head.{suffix}": tensor for suffix, tensor in head.tensors.items()}
        values["lm_head.weight"] = head.weight.float()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
        if architecture is not MIXTRAL:
            plain |= {f"{prefix}.self_attn.{name}_norm.weight": torch.ones(head_dim) for name in "qk"}
        if architecture.router:
            plain[f"{prefix}.{architecture.router}.weight"] = normal(EXPERTS, hidden)
        scales: dict[str, torch.Tensor] = {}
        for number, (name, (rows, columns)) in enumerate(shapes.items()):
            unit = seed + 100 * layer + number
            part = store(name, rows, columns, unit)
            weight = part.weight
            if stored_as.pre_quant_scale:
                # Layers that engines fuse have the same input, and so the same scale.
                scale = scales.setdefault(_input_of(name), 0.5 + torch.rand(columns, generator=random))
                part.tensors[modelopt.PRE_QUANT_SCALE] = scale.clone()
                weight = weight * scale.double()
            quantized |= {f"{prefix}.{name}.{suffix}": tensor for suffix, tensor in part.tensors.items()}
            values[f"{prefix}.{name}.weight"] = weight.float()
    config = _config(architecture, hidden, intermediate, head_dim)
    for folder, tensors, said in (
        (directory, quantized, {} if stored_as.in_config is None else {"quantization_config": stored_as.in_config}),
        (twin, values, {}),
    ):
        folder.mkdir(parents=True)
        save_file(plain | tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _write_json(folder / "config.json", config | said)
    stored_as.files(directory)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer whose tokens are single bytes."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def _input_of(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return module + ("/out" if leaf in ("o_proj", "down_proj", "w2") else "/in")


def _config(architecture: Architecture, hidden: int, intermediate: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **architecture.config,
    }


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))
