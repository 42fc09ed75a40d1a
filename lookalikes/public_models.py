"""Public models' shapes as config.json and safetensors header entries, without any file.

`server.plan` computes a memory plan from these two alone.
"""

from __future__ import annotations

from typing import Any

from quant.safetensors_header import Entry

GROUP = 16


class Entries(dict[str, Entry]):
    """Header entries, added tensor by tensor."""

    def plain(self, name: str, *shape: int, dtype: str = "BF16", size: int = 2) -> None:
        """One tensor of `size` bytes per element."""
        count = size
        for length in shape:
            count *= length
        self[name] = Entry(dtype, shape, 0, count)

    def linear(self, name: str, rows: int, columns: int) -> None:
        """The four tensors by which compressed-tensors stores a linear."""
        self.plain(f"{name}.weight_packed", rows, columns // 2, dtype="U8", size=1)
        self.plain(f"{name}.weight_scale", rows, columns // GROUP, dtype="F8_E4M3", size=1)
        self.plain(f"{name}.weight_global_scale", 1, dtype="F32", size=4)
        self.plain(f"{name}.input_global_scale", 1, dtype="F32", size=4)

    def attention(
        self, prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int, *, gated: bool = False
    ) -> None:
        """The four linears of attention. `gated`: queries carry a gate of their own size."""
        self.linear(f"{prefix}.q_proj", heads * head_dim * (2 if gated else 1), hidden)
        self.linear(f"{prefix}.k_proj", kv_heads * head_dim, hidden)
        self.linear(f"{prefix}.v_proj", kv_heads * head_dim, hidden)
        self.linear(f"{prefix}.o_proj", hidden, heads * head_dim)

    def mlp(self, prefix: str, hidden: int, intermediate: int) -> None:
        """The three linears of a gated MLP."""
        self.linear(f"{prefix}.gate_proj", intermediate, hidden)
        self.linear(f"{prefix}.up_proj", intermediate, hidden)
        self.linear(f"{prefix}.down_proj", hidden, intermediate)


def dense(name: str, **changes: Any) -> tuple[dict[str, Any], Entries]:
    """(config.json, entries) of a dense Qwen3: https://huggingface.co/Qwen/Qwen3-32B and its siblings.

    72B: https://huggingface.co/Qwen/Qwen2.5-72B, in the vocabulary of the others.
    """
    sizes = {
        "8B": (4096, 12288, 36, 32, 8),
        "14B": (5120, 17408, 40, 40, 8),
        "32B": (5120, 25600, 64, 64, 8),
        "72B": (8192, 29568, 80, 64, 8),
    }
    hidden, intermediate, layers, heads, kv_heads = sizes[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        **changes,
    }
    entries = Entries()
    entries.plain("model.embed_tokens.weight", 151936, hidden)
    entries.plain("lm_head.weight", 151936, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        entries.attention(f"{prefix}.self_attn", hidden, heads, kv_heads, 128)
        entries.mlp(f"{prefix}.mlp", hidden, intermediate)
        entries.plain(f"{prefix}.input_layernorm.weight", hidden)
    return config, entries


def mixture() -> tuple[dict[str, Any], Entries]:
    """(config.json, entries) of a mixture of experts: https://huggingface.co/Qwen/Qwen3-30B-A3B."""
    hidden, layers, experts = 2048, 48, 128
    config, entries = dense("32B", architectures=["Qwen3MoeForCausalLM"], hidden_size=hidden, num_hidden_layers=layers)
    config |= {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144}
    config |= {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    entries = Entries()
    entries.plain("model.embed_tokens.weight", 151936, hidden)
    entries.plain("lm_head.weight", 151936, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        entries.attention(f"{prefix}.self_attn", hidden, 32, 4, 128)
        entries.plain(f"{prefix}.mlp.gate.weight", experts, hidden)
        for number in range(experts):
            entries.mlp(f"{prefix}.mlp.experts.{number}", hidden, 768)
    return config, entries


def hybrid() -> tuple[dict[str, Any], Entries]:
    """(config.json, entries) of QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4: 48 Gated-DeltaNet and 16 full-attention layers."""
    hidden = 5120
    text = {
        "hidden_size": hidden,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "full_attention_interval": 4,
        "rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False}
    config["vision_config"] = {"depth": 27}
    entries = Entries()
    entries.plain("model.language_model.embed_tokens.weight", 248320, hidden)
    entries.plain("lm_head.weight", 248320, hidden)
    entries.plain("model.visual.blocks.0.mlp.linear_fc1.weight", 460_500, 1000)  # 0.921 GB of vision in all
    entries.plain("mtp.fc.weight", hidden, 2 * hidden)
    for layer in range(64):
        prefix = f"model.language_model.layers.{layer}"
        if (layer + 1) % 4 == 0:
            entries.attention(f"{prefix}.self_attn", hidden, 24, 4, 256, gated=True)
        else:
            entries.linear(f"{prefix}.linear_attn.in_proj_qkv", 10240, hidden)
            entries.linear(f"{prefix}.linear_attn.in_proj_z", 6144, hidden)
            entries.linear(f"{prefix}.linear_attn.in_proj_b", 48, hidden)
            entries.linear(f"{prefix}.linear_attn.in_proj_a", 48, hidden)
            entries.linear(f"{prefix}.linear_attn.out_proj", hidden, 6144)
            entries.plain(f"{prefix}.linear_attn.conv1d.weight", 10240, 1, 4)
            entries.plain(f"{prefix}.linear_attn.A_log", 48, dtype="F32", size=4)
        entries.mlp(f"{prefix}.mlp", hidden, 17408)
        entries.plain(f"{prefix}.input_layernorm.weight", hidden)
    return config, entries


def public_model(name: str, **changes: Any) -> tuple[dict[str, Any], Entries]:
    """(config.json, entries) by name: 8B, 14B, 32B, 72B, 30B-A3B for the mixture of experts, 27B for the hybrid.

    `changes` are to the config of a dense model.
    """
    made = {"27B": hybrid, "30B-A3B": mixture}
    return made[name]() if name in made else dense(name, **changes)
