"""Readable models that the engine cannot serve: one rule each. Torch-free.

When the engine learns to serve a case, its row or function here is removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from quant import architectures
from quant.formats.scheme import Scheme
from quant.verify.experts import EXPERT
from quant.verify.findings import Finding, error, list_some
from quant.verify.layers import Modules

CHECK = "unserved"

_LOOKED_UP = "the engine looks its rows up, and keeps them in 16 bits"
_ROUTER = "it decides which experts compute, and the engine keeps it in 16 bits"
# Modules that the engine's layers load in 16 bits only, whatever the config says. Patterns of whole names.
IN_16_BITS: Mapping[str, str] = {
    r".*\bembed_tokens(_per_layer)?|.*\b(wte|wpe|word_embeddings|embed_in)": _LOOKED_UP,
    r".*\.(gate|router|router\.proj|shared_expert_gate)": _ROUTER,
}
_PATTERNS = {re.compile(pattern): why for pattern, why in IN_16_BITS.items()}
# Architectures whose models in vLLM hand their quantization to the head.
QUANTIZED_HEADS = (
    *("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
)
_HEAD = re.compile(r"(.*\.)?lm_head")
# Keys of config.json that name the experts' activation.
_ACTIVATIONS = ("mlp_hidden_act", "hidden_activation", "hidden_act")
_SILU = ("silu", "swish", "swiglu")
_OTHER = "Choose a version of the model in which they are 16-bit"


def reason_for_16_bits(module: str) -> str | None:
    """Why the engine would not load this module in 4 bits. None if it would. MTP layers are never loaded."""
    if ".mtp." in f".{module}":
        return None
    return next((why for pattern, why in _PATTERNS.items() if pattern.fullmatch(module)), None)


def reason_for_a_16_bit_head(config: Mapping[str, object]) -> str | None:
    """Why the engine would not load this model's head in 4 or 8 bits. None if it would."""
    text = config.get("text_config")
    holders = [holder for holder in (config, text) if isinstance(holder, dict)]
    tied = [holder["tie_word_embeddings"] for holder in holders if "tie_word_embeddings" in holder]
    names = config.get("architectures")
    if not isinstance(names, list) or not set(map(str, names)) & set(QUANTIZED_HEADS):
        return f"the engine keeps the head of {_listed(names)} in 16 bits"
    if not tied or any(tied):
        return "the engine keeps a head in 16 bits unless config.json says tie_word_embeddings false"
    return None


def check_layers(modules: Modules, config: Mapping[str, object]) -> list[Finding]:
    """Finds quantized modules that the engine only loads in 16 bits, and FP8 of shapes that its kernels lack."""
    by_reason: dict[str, list[str]] = {}
    for module in modules.quantized:
        if why := reason_for_a_16_bit_head(config) if _HEAD.fullmatch(module) else reason_for_16_bits(module):
            by_reason.setdefault(why, []).append(module)
    findings = []
    for why, found in by_reason.items():
        kinds = " and ".join(sorted({str(modules.quantized[module][2]) for module in found}))
        findings.append(error(CHECK, "", found[0], "16-bit weights", f"{kinds} in {list_some(found)}: {why}", _OTHER))
    if experts := [module for module in modules.fp8 if EXPERT.match(module) and ".mtp." not in f".{module}"]:
        got = f"FP8 in {list_some(experts, 2)}"
        expected = "experts in NVFP4 or 16 bits; the kernel for experts reads no FP8"
        findings.append(error(CHECK, "", experts[0], expected, got, _OTHER))
    return findings


def check_experts(config: Mapping[str, object], modules: Modules) -> list[Finding]:
    """Finds NVFP4 experts of a kind that the engine's kernel for experts does not compute."""
    experts = [module for module in modules.nvfp4 if EXPERT.match(module) and ".mtp." not in f".{module}"]
    if not experts:
        return []
    findings = []
    first = experts[0]
    text = config.get("text_config")
    sizes = text if isinstance(text, dict) else config
    said = next(((key, sizes[key]) for key in _ACTIVATIONS if isinstance(sizes.get(key), str)), None)
    if said and said[1] not in _SILU:
        got = f"{said[0]} {said[1]!r} in config.json"
        findings.append(error(CHECK, "", first, "gated SiLU experts, the one kind computed in 4 bits", got, _OTHER))
    if scaled := [module for module in experts if module in modules.pre_quant_scales]:
        got = f"one in {list_some(scaled, 2)}"
        remedy = "Choose an NVFP4 or W4A16_NVFP4 export of the model"
        findings.append(error(CHECK, "", scaled[0], "experts without pre_quant_scale (NVFP4_AWQ)", got, remedy))
    findings += _misnamed(config.get("architectures"), experts)
    return findings


def _misnamed(names: object, experts: Collection[str]) -> list[Finding]:
    """Finds experts under names that the engine's model of this architecture does not read."""
    read = architectures.expert_names(names)
    taken = {name for known in read for name in known}
    for module in experts:
        leaf = module.rpartition(".")[2]
        if taken and leaf not in taken:
            expected = f"experts named {', '.join(read[0])}, as vLLM's {_listed(names)} reads them"
            remedy = "Choose a version of the model with the names of its original"
            return [error(CHECK, "", module, expected, f"{leaf}", remedy)]
    return []


def check_scheme(scheme: Scheme, tensors: Iterable[str]) -> list[Finding]:
    """Finds NVFP4 with a further term that no GEMM here adds."""
    low_rank = [name for name in tensors if "svdquant" in name or name.endswith((".lora_a", ".lora_b"))]
    if not low_rank:
        return []
    expected = "NVFP4 linears and nothing beside them"
    got = f"low-rank parts (SVDQuant) in {len(low_rank)} tensors: {list_some(low_rank, 2)}"
    remedy = "Choose a version of the model without SVDQuant"
    return [error(CHECK, "", low_rank[0], expected, got, remedy)]


def _listed(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else "model"
