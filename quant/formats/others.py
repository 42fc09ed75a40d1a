"""Quantizations that are not ours, and whether vLLM 0.19.1 serves them on a V100 or a CPU. Torch-free.

vLLM demands a compute capability per quantization, and not all of its kernels have code for 7.0. For V100s the table
follows vLLM's sources and the machine code in its wheel; nothing in it was run on a V100. For CPUs it follows the
sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

# What an engine runs on: a CPU, V100s, or other GPUs. On those vLLM decides itself.
Device = Literal["cpu", "volta", "gpu"]
ON = {"cpu": "a CPU", "volta": "a V100", "gpu": "these GPUs"}

_REMEDY = "Choose a GPTQ, AWQ, GGUF or NVFP4 version of the model"
_CPU = "vLLM's kernels for integer weights on CPUs"
_EXLLAMA = "vLLM's gptq_gemm (exllama kernels), whose machine code for 7.0 is in the wheel; float16 only"


@dataclass(frozen=True)
class Other:
    """A value of `quant_method` or `--quantization`.

    what: a description for people. volta: the kernels that compute it on a V100, or "". Then `why` names the obstacle.
    cpu: the same on a CPU.
    """

    what: str
    volta: str = ""
    why: str = ""
    remedy: str = _REMEDY
    cpu: str = ""

    def computed_by(self, device: Device) -> str:
        """The kernels that compute it there, or "". On GPUs that are not V100s, vLLM decides."""
        return {"volta": self.volta, "cpu": self.cpu, "gpu": "vLLM's kernels"}[device]

    def obstacle(self, device: Device) -> str:
        """Why nothing computes it there."""
        return self.why if device == "volta" else "vLLM's CPU engine has no kernels for it"


OTHERS: Mapping[str, Other] = {
    "gptq": Other("GPTQ, integers of 2, 3, 4 or 8 bits", _EXLLAMA, cpu=_CPU),
    "awq": Other(
        "AWQ, 4-bit integers with zero points",
        f"{_EXLLAMA}; its own kernels are empty on 7.0, so it is repacked",
        cpu=_CPU,
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


def meets(data: Mapping[str, object] | None, asked: str | None) -> tuple[str, Other] | None:
    """The method's name and its row, for a model that is not NVFP4. None if the method is unknown.

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
    if method in ("modelopt", "modelopt_fp4") and (algorithm := _algorithm(data)):
        return method, replace(OTHERS["modelopt"], what=f"ModelOpt's {algorithm}")
    return (method, OTHERS[method]) if method in OTHERS else None


def _algorithm(data: Mapping[str, object] | None) -> str:
    """ModelOpt's quant_algo, nested or flat."""
    inner = (data or {}).get("quantization")
    body = inner if isinstance(inner, dict) else data or {}
    return str(body.get("quant_algo") or "")


def _compressed_tensors(data: Mapping[str, object]) -> Other:
    """Integer weights with 16-bit activations run by exllama's kernels where they are symmetric and in groups."""
    groups = data.get("config_groups")
    described = [group for group in (groups.values() if isinstance(groups, dict) else ()) if isinstance(group, dict)]
    kinds = {
        f"{weights.get('type', 'int')} of {weights.get('num_bits')} bits"
        for group in described
        if isinstance(weights := group.get("weights"), dict)
    }
    if len(kinds) > 1:
        mixed = f"compressed-tensors, mixed precision: {', '.join(sorted(kinds))}"
        return Other(mixed, why="no engine here computes with several kinds of weights in one model")
    for group in described:
        weights = group.get("weights")
        if not isinstance(weights, dict):
            continue
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        what = f"compressed-tensors, {kind} weights of {bits} bits"
        if group.get("input_activations"):
            integers = _CPU if kind == "int" and bits == 8 else ""
            return Other(what, why="its activations are quantized too, for which vLLM demands 7.5", cpu=integers)
        if kind != "int" or bits not in (4, 8):
            return Other(what, why="vLLM demands 7.5 or more")
        if weights.get("strategy") != "group" or not weights.get("symmetric", True):
            return Other(what, why="exllama's kernels need symmetric weights in groups", cpu=_CPU)
    return Other("compressed-tensors, integer weights", _EXLLAMA, cpu=_CPU)
