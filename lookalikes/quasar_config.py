"""The configuration of QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4 at its true sizes, and scaled down. Imports nothing.

Keys, values and the ignore list are the public checkpoint's (its config.json).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """What differs between the original and what is made in its likeness. `linear_dim`: of Gated DeltaNet's heads."""

    hidden: int
    intermediate: int
    layers: int
    head_dim: int
    linear_dim: int
    vocabulary: int
    positions: int
    mrope_section: tuple[int, int, int]
    vision: dict[str, int]
    heads: int = 24
    kv_heads: int = 4
    key_heads: int = 16
    value_heads: int = 48


ORIGINAL = Sizes(
    hidden=5120,
    intermediate=17408,
    layers=64,
    head_dim=256,
    linear_dim=128,
    vocabulary=248320,
    positions=262144,
    mrope_section=(11, 11, 10),
    vision={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
    },
)
SMALL = Sizes(
    hidden=160,
    intermediate=576,
    layers=8,
    head_dim=64,
    linear_dim=16,
    vocabulary=512,
    positions=4096,
    mrope_section=(3, 3, 2),
    vision={"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_position_embeddings": 16},
)
IGNORE = (
    *("lm_head", "re:.*visual.*", "re:.*mtp.*", "re:.*embed_vision.*", "re:.*embed_audio.*", "re:.*vision_embedder.*"),
)
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "producer": {"name": "qatfactory", "version": "0.1.0"},
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
                "observer": "memoryless_minmax",
                "scale_dtype": "torch.float8_e4m3fn",
            },
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": "local",
                "observer": "static_minmax",
                "scale_dtype": "torch.float8_e4m3fn",
            },
        }
    },
    "ignore": list(IGNORE),
    "kv_cache_scheme": None,
}


def config(sizes: Sizes) -> dict[str, Any]:
    """config.json."""
    kinds = ["linear_attention" if (number + 1) % 4 else "full_attention" for number in range(sizes.layers)]
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "full_attention_interval": 4,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": sizes.linear_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_value_head_dim": sizes.linear_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": sizes.positions,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(sizes.mrope_section),
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": sizes.vocabulary,
    }
    vision = {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "initializer_range": 0.02,
        "out_hidden_size": sizes.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    } | sizes.vision
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "language_model_only": False,
        "image_token_id": sizes.vocabulary - 4,
        "video_token_id": sizes.vocabulary - 3,
        "vision_start_token_id": sizes.vocabulary - 6,
        "vision_end_token_id": sizes.vocabulary - 5,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        "quantization_config": QUANTIZATION,
    }
