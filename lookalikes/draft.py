"""A random DFlash draft for a look-alike: one layer that reads two of the target's hidden states.

Tensors and config have the names of the public drafts. Its guesses are random, so the target accepts few of them: what
it checks is that a draft is loaded, asked, and judged.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK = 4  # tokens that it guesses at once
_READ = [0, 1]  # the target's layers whose hidden states it reads


def write_dflash(directory: Path, target: Path, seed: int = 1) -> None:
    """Writes a draft for the look-alike in `target` (lookalikes.random_models.write_model), in float32."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    hidden, wide, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    random = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).div(columns**0.5)

    tensors = {
        "fc.weight": normal(hidden, len(_READ) * hidden),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "layers.0.self_attn.q_proj.weight": normal(heads * width, hidden),
        "layers.0.self_attn.k_proj.weight": normal(kv_heads * width, hidden),
        "layers.0.self_attn.v_proj.weight": normal(kv_heads * width, hidden),
        "layers.0.self_attn.o_proj.weight": normal(hidden, heads * width),
        "layers.0.self_attn.q_norm.weight": torch.ones(width),
        "layers.0.self_attn.k_norm.weight": torch.ones(width),
        "layers.0.mlp.gate_proj.weight": normal(wide, hidden),
        "layers.0.mlp.up_proj.weight": normal(wide, hidden),
        "layers.0.mlp.down_proj.weight": normal(hidden, wide),
        "layers.0.input_layernorm.weight": torch.ones(hidden),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    config |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "num_target_layers": config["num_hidden_layers"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": config["vocab_size"] - 1, "target_layer_ids": _READ},
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
