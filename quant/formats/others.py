"""Quantizations that the engine has no kernels for, by name. Torch-free.

vLLM's compiled kernels are not installed (engine/operators), and its Triton kernels need tensor cores that a V100
lacks. What our kernels compute has an entry in quant/formats/registry.py instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What an engine runs on: a CPU, V100s, or other GPUs that are treated as V100s.
Device = Literal["cpu", "volta", "gpu"]
ON = {"cpu": "a CPU", "volta": "a V100", "gpu": "these GPUs"}

_WHY = "our kernels compute NVFP4 and FP8 only"
_REMEDY = (
    "Choose an NVFP4 or FP8 version of the model, or make an NVFP4 one of its 16-bit version with `voltserve quantize`"
)


@dataclass(frozen=True)
class Other:
    """A value of `quant_method` or `--quantization`: what it is, for people, and why it is not served."""

    what: str
    why: str = _WHY
    remedy: str = _REMEDY


OTHERS: Mapping[str, Other] = {
    "gptq": Other("GPTQ, integers of 2, 3, 4 or 8 bits"),
    "awq": Other("AWQ, 4-bit integers with zero points"),
    "gguf": Other("GGUF", remedy="Convert an NVFP4 GGUF with `voltserve convert`, or choose another version"),
    "bitsandbytes": Other("bitsandbytes, 4 or 8 bits"),
    "moe_wna16": Other("experts in 4 or 8 bits by Triton"),
    "humming": Other("weights of 1 to 8 bits by Humming's kernels"),
    "fp8": Other("quantizing to FP8 while loading"),
    "fbgemm_fp8": Other("FP8, 8-bit float weights"),
    "deepseek_v4_fp8": Other("DeepSeek's FP8, 8-bit float weights in blocks"),
    "experts_int8": Other("experts in 8-bit integers"),
    "modelopt": Other("quantizing as ModelOpt does while loading"),
    "modelopt_mxfp8": Other("ModelOpt's MXFP8"),
    "mxfp4": Other("MXFP4: E2M1 weights with power-of-two (E8M0) scales for 32 weights"),
    "gpt_oss_mxfp4": Other("gpt-oss's MXFP4 experts"),
    "mxfp8": Other("MXFP8"),
    "fp_quant": Other("FP-Quant"),
    "quark": Other("AMD Quark, usually MXFP4 or FP8"),
    "torchao": Other("torchao"),
    "online": Other("quantizing while loading"),
    "fp8_per_tensor": Other("quantizing to FP8 while loading"),
    "fp8_per_block": Other("quantizing to FP8 while loading"),
    "fp8_per_channel": Other("quantizing to FP8 while loading"),
    "int8_per_channel_weight_only": Other("quantizing to 8-bit integers while loading"),
    "nvfp4_per_token": Other("quantizing to NVFP4 while loading"),
}
# Other names for the same.
_ALIASES = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "cpu_awq": "awq",
}


def meets(data: Mapping[str, object] | None, asked: str | None) -> tuple[str, Other] | None:
    """The method's name and its row, for a model that is neither NVFP4 nor FP8. None if the method is unknown.

    `data`: config.json's quantization_config, if any. `asked`: the value of --quantization, which may name another
    kernel for the same weights, or quantize a 16-bit model while loading.
    """
    method = asked or str((data or {}).get("quant_method") or "")
    if data and method == "compressed-tensors":
        return method, _compressed_tensors(data)
    if data and method in ("auto-round", "inc"):
        packing = str(data.get("packing_format") or "auto_round:auto_gptq").rpartition(":")[2]
        return method, OTHERS[_ALIASES.get(packing, "gptq")]
    if method in ("modelopt", "modelopt_fp4") and (algorithm := _algorithm(data)):
        return method, Other(f"ModelOpt's {algorithm}")
    row = OTHERS.get(_ALIASES.get(method, method))
    return None if row is None else (method, row)


def _algorithm(data: Mapping[str, object] | None) -> str:
    """ModelOpt's quant_algo, nested or flat."""
    inner = (data or {}).get("quantization")
    body = inner if isinstance(inner, dict) else data or {}
    return str(body.get("quant_algo") or "")


def _compressed_tensors(data: Mapping[str, object]) -> Other:
    """What the groups of a compressed-tensors config describe."""
    groups = data.get("config_groups")
    kinds = {
        f"{weights.get('type', 'int')} weights of {weights.get('num_bits')} bits"
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict)
    }
    if len(kinds) > 1:
        return Other(f"compressed-tensors, mixed precision: {', '.join(sorted(kinds))}")
    return Other(f"compressed-tensors, {kinds.pop() if kinds else 'weights not described'}")
