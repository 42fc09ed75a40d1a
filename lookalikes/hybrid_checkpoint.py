"""A random checkpoint with the names, dtypes and shapes of Qwen3.8-27B-QUASAR-NVFP4, without its vision tower.

The tower is declared in config.json, as is the MTP layer, whose tensors the original lacks too. An engine that serves
text only loads neither.
"""

from pathlib import Path

import torch

from lookalikes.checkpoint_writer import Writer
from lookalikes.quasar_config import Sizes, config


class HybridWriter(Writer):
    """One shard a layer."""

    def __init__(self, folder: Path, sizes: Sizes, device: str, seed: int) -> None:
        super().__init__(folder, device, seed)
        self.sizes = sizes

    def uniform(self, count: int, low: float, high: float) -> torch.Tensor:
        """float32."""
        return low + (high - low) * torch.rand(count, device=self.device, generator=self.random)

    def layer(self, index: int) -> None:
        """One decoder layer; every fourth has full attention, whose queries bring a gate of their own size."""
        s, prefix = self.sizes, f"model.language_model.layers.{index}"
        tensors: dict[str, torch.Tensor] = {}
        if (index + 1) % 4 == 0:
            attention = f"{prefix}.self_attn"
            self.linear(tensors, f"{attention}.q_proj", 2 * s.heads * s.head_dim, s.hidden)
            for name in ("k_proj", "v_proj"):
                self.linear(tensors, f"{attention}.{name}", s.kv_heads * s.head_dim, s.hidden)
            self.linear(tensors, f"{attention}.o_proj", s.hidden, s.heads * s.head_dim)
            for name in ("q_norm", "k_norm"):
                tensors[f"{attention}.{name}.weight"] = torch.zeros(s.head_dim, dtype=torch.bfloat16)
        else:
            attention = f"{prefix}.linear_attn"
            values = s.value_heads * s.linear_dim
            channels = 2 * s.key_heads * s.linear_dim + values
            self.linear(tensors, f"{attention}.in_proj_qkv", channels, s.hidden)
            self.linear(tensors, f"{attention}.in_proj_z", values, s.hidden)
            for name in ("in_proj_b", "in_proj_a"):
                self.linear(tensors, f"{attention}.{name}", s.value_heads, s.hidden)
            self.linear(tensors, f"{attention}.out_proj", s.hidden, values)
            tensors[f"{attention}.conv1d.weight"] = self.dense(channels, 4, 0.5).bfloat16()[:, None]
            tensors[f"{attention}.norm.weight"] = torch.ones(s.linear_dim)
            # States that forget at rates between those of a sentence and of a page.
            tensors[f"{attention}.A_log"] = self.uniform(s.value_heads, 0.5, 8.0).log()
            tensors[f"{attention}.dt_bias"] = self.uniform(s.value_heads, -5.0, 0.0).bfloat16()
        for name, rows, columns in (
            ("gate_proj", s.intermediate, s.hidden),
            ("up_proj", s.intermediate, s.hidden),
            ("down_proj", s.hidden, s.intermediate),
        ):
            self.linear(tensors, f"{prefix}.mlp.{name}", rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.zeros(
                s.hidden, dtype=torch.bfloat16
            )  # these norms scale by 1 + w
        self.save(f"layer-{index:03}.safetensors", tensors)


def write(sizes: Sizes, folder: Path, device: str = "cpu", seed: int = 0) -> int:
    """Writes the directory; returns the bytes of its tensors."""
    writer = HybridWriter(folder, sizes, device, seed)
    for index in range(sizes.layers):
        writer.layer(index)
    embedding, head = (writer.dense(sizes.vocabulary, sizes.hidden, spread) for spread in (1.0, 2 * sizes.hidden**-0.5))
    rest = {
        "model.language_model.embed_tokens.weight": embedding.bfloat16(),
        "lm_head.weight": head.bfloat16(),
        "model.language_model.norm.weight": torch.zeros(sizes.hidden, dtype=torch.bfloat16),
    }
    writer.save("rest.safetensors", rest)
    writer.finish(config(sizes))
    return writer.total
