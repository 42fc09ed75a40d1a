"""Refuses, before any weight is read, what would call an operator that is absent (engine/operators/absent.py).

Such a model would load for minutes, and fail at its first request, or when a graph is captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Their layers are Mamba's first kind. A test compares them with vLLM's modules.
MAMBA_1 = ("FalconMambaForCausalLM", "JambaForCausalLM", "JambaForSequenceClassification", "MambaForCausalLM")
MINIMAX_M3 = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")


@dataclass(frozen=True)
class Need:
    """What `applies` to a configuration of vLLM's calls one of `operators`, and none of them is here."""

    what: str
    operators: tuple[str, ...]
    applies: Callable[[Any], bool]
    remedy: str


def _is_one_of(names: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda config: any(name in names for name in config.model_config.architectures)


_ANOTHER = "Serve another model"

NEEDS = (
    Need(
        "multi-head latent attention",
        ("_C_cache_ops.concat_and_cache_mla", "_C.mla_decode_kvcache"),
        lambda config: bool(config.model_config.use_mla),
        _ANOTHER,
    ),
    Need("Mamba-1 layers", ("_C.selective_scan_fwd",), _is_one_of(MAMBA_1), _ANOTHER),
    Need(
        "sparse attention of MiniMax M3",
        ("_C.fused_minimax_m3_qknorm_rope_kv_insert",),
        _is_one_of(MINIMAX_M3),
        _ANOTHER,
    ),
    Need(
        "LoRA adapters of experts",
        ("_moe_C.moe_lora_align_block_size",),
        lambda config: config.lora_config is not None and bool(config.model_config.is_moe),
        "Leave out --enable-lora, and merge the adapter into the model",
    ),
    Need(
        "a cache that is moved to host memory",
        ("_C_cache_ops.swap_blocks_batch",),
        lambda config: (
            "Offloading" in str(getattr(config.kv_transfer_config, "kv_connector", ""))
            or config.cache_config.kv_offloading_size is not None
        ),
        "Leave out --kv-offloading-size and --kv-transfer-config",
    ),
)


def refuse(config: Any) -> None:
    """Checks vLLM's `config` before the engine starts.

    Raises:
        ValueError: the model or a flag needs an operator that nobody computes. It is named, with the remedy.
    """
    if config.model_config is None:
        return
    for need in NEEDS:
        if need.applies(config):
            raise ValueError(
                f"{config.model_config.model}: {need.what}: expected operators that voltserve computes, got "
                f"{' and '.join(need.operators)}, which nobody does here. {need.remedy}"
            )
