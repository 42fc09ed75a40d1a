"""Random NVFP4 checkpoints of known decoders' shapes, at their true sizes, and their float16 twins."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lookalikes.checkpoint_writer import GROUP, Writer

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Shape:
    """What config.json says of a decoder's size, `experts` 0: dense; and how sure its routers are."""

    architecture: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: bool
    experts: int = 0
    router: float = 1.0  # the deviation of its logits


QWEN3_32B = Shape("Qwen3ForCausalLM", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936, True)
# A quarter of Qwen3-30B-A3B's width and few layers and experts, with SmolLM2's vocabulary: small enough for a CPU.
MOE = Shape("Qwen3MoeForCausalLM", "qwen3_moe", 512, 256, 4, 8, 2, 64, 49152, True, experts=16)
SHAPES = {
    "smollm2": Shape("LlamaForCausalLM", "llama", 576, 1536, 30, 9, 3, 64, 49152, False),
    "qwen3-32b": QWEN3_32B,
    "qwen3-32b-8-layers": replace(QWEN3_32B, layers=8),
    "moe": MOE,
    "moe-sure": replace(MOE, router=4.0),  # the last expert taken weighs little
}


def config(shape: Shape) -> dict[str, object]:
    """config.json."""
    made: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "dtype": "float16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "tensor_group",
                        "group_size": GROUP,
                        "symmetric": True,
                        "dynamic": False,
                    },
                    "input_activations": None,
                }
            },
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "kv_cache_scheme": None,
        },
    }
    if shape.experts:
        made |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": shape.intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return made


class DecoderWriter(Writer):
    """One shard a layer."""

    def __init__(self, folder: Path, shape: Shape, device: str, seed: int) -> None:
        super().__init__(folder, device, seed)
        self.shape = shape

    def layer(self, index: int) -> None:
        """One decoder layer."""
        s, prefix = self.shape, f"model.layers.{index}"
        tensors: dict[str, torch.Tensor] = {}
        self.linear(tensors, f"{prefix}.self_attn.q_proj", s.heads * s.head_dim, s.hidden)
        for name in ("k_proj", "v_proj"):
            self.linear(tensors, f"{prefix}.self_attn.{name}", s.kv_heads * s.head_dim, s.hidden)
        self.linear(tensors, f"{prefix}.self_attn.o_proj", s.hidden, s.heads * s.head_dim)
        blocks = [f"{prefix}.mlp.experts.{expert}" for expert in range(s.experts)] or [f"{prefix}.mlp"]
        for block in blocks:
            self.linear(tensors, f"{block}.gate_proj", s.intermediate, s.hidden)
            self.linear(tensors, f"{block}.up_proj", s.intermediate, s.hidden)
            self.linear(tensors, f"{block}.down_proj", s.hidden, s.intermediate)
        if s.experts:
            tensors[f"{prefix}.mlp.gate.weight"] = self.dense(s.experts, s.hidden, s.router * s.hidden**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(s.hidden, dtype=torch.float16)
        if s.qk_norm:
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = torch.ones(s.head_dim, dtype=torch.float16)
        self.save(f"layer-{index:03}.safetensors", tensors)


class TwinWriter(DecoderWriter):
    """The same weights, dequantized in float32 and rounded to float16."""

    def linear(self, tensors: dict[str, torch.Tensor], name: str, rows: int, columns: int) -> None:
        """As a 16-bit checkpoint holds it."""
        parts: dict[str, torch.Tensor] = {}
        super().linear(parts, name, rows, columns)
        codes, scales, divisor = parts.values()
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()  # the even column is in the low nibble
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)[codes]
        blocks = values.unflatten(1, (-1, GROUP)) * scales.float().unsqueeze(-1)
        tensors[f"{name}.weight"] = (blocks.flatten(1) / divisor.to(codes.device)).half()


def write(shape: Shape, folder: Path, device: str = "cpu", seed: int = 0, *, twin: bool = False) -> int:
    """Writes the directory; returns the bytes of its tensors."""
    writer = (TwinWriter if twin else DecoderWriter)(folder, shape, device, seed)
    for index in range(shape.layers):
        writer.layer(index)
    rest = {
        "model.embed_tokens.weight": writer.dense(shape.vocabulary, shape.hidden, 1.0),
        # Logits some units apart, so that greedy decoding is no coin toss.
        "lm_head.weight": writer.dense(shape.vocabulary, shape.hidden, 2 * shape.hidden**-0.5),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.float16),
    }
    writer.save("rest.safetensors", rest)
    made = config(shape)
    if twin:
        del made["quantization_config"]
    writer.finish(made)
    return writer.total
