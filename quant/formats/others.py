"""Quantizations that are not ours: what they are, and what a V100 makes of them with vLLM 0.19.1. Torch-free.

vLLM has compute capabilities that it demands of each, and kernels with and without code for 7.0. The table is what its
sources and the machine code in its wheel say; none of it was run on a V100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_REMEDY = "Choose a GPTQ, AWQ, GGUF or NVFP4 version of the model"
_EXLLAMA = "vLLM's gptq_gemm (exllama kernels), whose machine code for 7.0 is in the wheel; float16 only"


@dataclass(frozen=True)
class Other:
    """A value of `quant_method` or `--quantization`.

    what: for people. volta: what computes it on a V100, empty where nothing does; then `why` says what is in the way.
    """

    what: str
    volta: str = ""
    why: str = ""
    remedy: str = _REMEDY


OTHERS: Mapping[str, Other] = {
    "gptq": Other("GPTQ, integers of 2, 3, 4 or 8 bits", _EXLLAMA),
    "awq": Other(
        "AWQ, 4-bit integers with zero points", f"{_EXLLAMA}; its own kernels are empty on 7.0, so it is repacked"
    ),
    "gguf": Other("GGUF", "vLLM's GGUF kernels, whose machine code for 7.0 is in the wheel"),
    "gptq_marlin": Other(
        "GPTQ by Marlin's kernels", why="they need 7.5", remedy="Leave --quantization out, or give gptq: it runs there"
    ),
    "awq_marlin": Other(
        "AWQ by Marlin's kernels", why="they need 7.5", remedy="Leave --quantization out, or give awq: it runs there"
    ),
    "bitsandbytes": Other("bitsandbytes, 4 or 8 bits", why="the bitsandbytes package is not part of this service"),
    "moe_wna16": Other(
        "experts in 4 or 8 bits by Triton", why="its kernels multiply by tensor-core code that 7.0 lacks"
    ),
    "fp8": Other("FP8, 8-bit float weights", why="vLLM demands 7.5"),
    "fbgemm_fp8": Other("FP8, 8-bit float weights", why="vLLM demands 8.0"),
    "experts_int8": Other("experts in 8-bit integers", why="vLLM demands 8.0"),
    "modelopt": Other("ModelOpt's FP8", why="vLLM demands 8.9"),
    "modelopt_mxfp8": Other("ModelOpt's MXFP8", why="vLLM demands 10.0"),
    "mxfp4": Other("MXFP4: E2M1 weights with power-of-two (E8M0) scales for 32 weights", why="vLLM demands 8.0"),
    "mxfp8": Other("MXFP8", why="vLLM demands 10.0"),
    "fp_quant": Other("FP-Quant", why="vLLM demands 10.0"),
    "quark": Other("AMD Quark, usually MXFP4 or FP8", why="its kernels are AMD's"),
    "petit_nvfp4": Other("NVFP4 by AMD's kernels", why="vLLM demands 9.0"),
    "torchao": Other("torchao", why="vLLM demands 7.5"),
}
_GPTQ_BITS = (2, 3, 4, 8)
_AUTO_ROUND = {"auto_gptq": "gptq", "auto_awq": "awq"}


def on_volta(data: Mapping[str, object] | None, asked: str | None) -> tuple[str, Other] | None:
    """What a model that is not NVFP4 meets on a V100: the method's name and its row; None where nothing is known of it.

    `data`: config.json's quantization_config, if any. `asked`: the value of --quantization, which may name another
    kernel for the same weights, or quantize a 16-bit model while loading.
    """
    method = asked or str((data or {}).get("quant_method") or "")
    if data and method == "compressed-tensors":
        return method, _compressed_tensors(data)
    if data and method in ("auto-round", "inc"):
        packing = str(data.get("packing_format") or "auto_round:auto_gptq").rpartition(":")[2]
        method = _AUTO_ROUND.get(packing, method)
    if data and method == "gptq" and (bits := data.get("bits")) not in _GPTQ_BITS:
        return method, Other("GPTQ", why=f"its kernels take 2, 3, 4 or 8 bits, got {bits}")
    if data and method == "awq" and (bits := data.get("bits", data.get("w_bit"))) != 4:
        return method, Other("AWQ", why=f"its weights must be of 4 bits, got {bits}")
    return (method, OTHERS[method]) if method in OTHERS else None


def _compressed_tensors(data: Mapping[str, object]) -> Other:
    """Integer weights with 16-bit activations run by exllama's kernels where they are symmetric and in groups."""
    groups = data.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        what = f"compressed-tensors, {kind} weights of {bits} bits"
        if group.get("input_activations"):
            return Other(what, why="its activations are quantized too, for which vLLM demands 7.5")
        if kind != "int" or bits not in (4, 8):
            return Other(what, why="vLLM demands 7.5 or more")
        if weights.get("strategy") != "group" or not weights.get("symmetric", True):
            return Other(what, why="exllama's kernels need symmetric weights in groups")
    return Other("compressed-tensors, integer weights", _EXLLAMA)
