"""Small random NVFP4 models of kinds that vLLM has since 0.20, beside transformers' models of the same values.

Configs have the structure of public ones, scaled down: every kind of layer that the original has, and widths that fit
no tile. Tensors are named as transformers writes them, which is how the public checkpoints name theirs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lookalikes.random_models import write_tokenizer
from quant.blockwise import quantize_matrix
from quant.formats import compressed_tensors
from quant.formats.compressed_tensors import LAYOUT
from quant.formats.linear import read_linear

GROUP = 16
WEIGHTS = "model.safetensors"
_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 80,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_TIED = 0.15  # an embedding's deviation where it also is the head: larger, and each token would predict itself
_ONE_OF_EACH = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Kind:
    """One kind: transformers' name for its config, the config, and modules that stay in 16 bits."""

    model_type: str
    config: dict[str, Any]
    ignore: tuple[str, ...] = ("lm_head",)


KINDS = {
    # google/gemma-4-12B: wider heads, and keys that are values, in layers with full attention.
    "gemma-4-12b": Kind(
        "gemma4_unified",
        {
            "text_config": {
                **_SIZES,
                "num_hidden_layers": 3,
                "layer_types": [*_ONE_OF_EACH, "full_attention"],
                "sliding_window": 8,
                "global_head_dim": 64,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "final_logit_softcapping": 30.0,
            },
            "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "model_patch_size": 8, "mm_embed_dim": 32},
            "audio_config": None,
        },
        ("lm_head", "re:.*vision_embedder.*", "re:.*embed_vision.*"),
    ),
    # Mamba-2, experts with squared ReLU and no gate (in 16 bits: only gated ones are computed in 4), no positions.
    "nemotron-h": Kind(
        "nemotron_h",
        {
            **_SIZES,
            **_EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "routed_scaling_factor": 2.5,
        },
        ("lm_head", "re:.*mixer.gate$", "re:.*conv1d$", "re:.*mixer.experts.*"),
    ),
    "qwen3.5-text": Kind(
        "qwen3_5_text",
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
        ("lm_head", "re:.*in_proj_[ab]$", "re:.*conv1d$"),
    ),
    # Layers differ in their number of heads; attention has a gate for each; one expert is shared.
    "laguna": Kind(
        "laguna",
        {
            **_SIZES,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", *_ONE_OF_EACH],
            "num_attention_heads_per_layer": [4, 6, 4],
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
            "sliding_window": 8,
        },
        ("lm_head", "re:.*mlp.gate$", "re:.*g_proj$"),
    ),
}


def write(kind: Kind, directory: Path, twin: Path) -> PreTrainedModel:
    """Writes the NVFP4 model into `directory`, and its values in float32 into `twin`; returns the twin, loaded."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.model_type, **kind.config)).save_pretrained(twin)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    drawn = load_file(twin / WEIGHTS)
    for number, (name, tensor) in enumerate(sorted(drawn.items())):
        values[name] = _drawn(name, tensor.float(), number, tied="lm_head.weight" not in drawn)
        module = name.removesuffix(".weight")
        if re.search(r"_proj(_qkv|_z)?\.weight$", name) and not _kept(module, kind.ignore):
            made = quantize_matrix(
                values[name], amax=float(values[name].abs().max()) * (1 + 0.1 * (number % 7)), name=name
            )
            tensors = {
                LAYOUT.codes: made.codes,
                LAYOUT.scales: made.block_scales,
                LAYOUT.global_scale: 1 / made.row_factor[:1],
            }
            values[name] = read_linear(LAYOUT, tensors, module, GROUP).dequantize(torch.float32)
            stored |= {f"{module}.{suffix}": part for suffix, part in tensors.items()}
        else:
            stored[name] = values[name]
    directory.mkdir(parents=True)
    save_file(values, twin / WEIGHTS, metadata={"format": "pt"})
    save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    config["quantization_config"] = compressed_tensors.write_config(GROUP, kind.ignore)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(directory)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    return loaded.eval()


def _kept(module: str, ignore: tuple[str, ...]) -> bool:
    return any(re.match(name[3:], module) if name.startswith("re:") else name == module for name in ignore)


def _drawn(name: str, tensor: torch.Tensor, number: int, *, tied: bool) -> torch.Tensor:
    """Weights with which states decay at different rates, and logits lie apart, so that greedy choices are clear."""
    random = torch.Generator().manual_seed(number)
    if name.endswith("A_log"):
        return torch.empty_like(tensor).uniform_(0.5, 8, generator=random).log()
    if name.endswith("dt_bias"):
        return torch.empty_like(tensor).uniform_(-5, 0, generator=random)
    drawn = torch.randn(tensor.shape, generator=random)
    if tensor.dim() == 1:
        return tensor + 0.1 * drawn
    if "conv1d" in name:
        return 0.5 * drawn
    if "embed" in name:
        return (_TIED if tied else 1.0) * drawn
    return (0.3 if "lm_head" in name else 1.5 * tensor.shape[-1] ** -0.5) * drawn
