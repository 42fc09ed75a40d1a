"""Mixtures of experts: compares a model's tensors with config.json. Torch-free.

Engines load a layer's experts as two matrices: one for gate and up, one for down. So all experts must be present, have
the declared sizes, and be quantized all or none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quant.verify.findings import Finding, error, list_some
from quant.verify.layers import Modules

# `model.layers.0.mlp.experts.17.gate_proj`: the layer's experts, the number, the projection.
EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>\w+)$")
# Checkpoints' names of gate, down and up. N and K of each, as indices into (intermediate, hidden).
PROJECTIONS = (("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3"))
_DOWN = tuple(down for _, down, _ in PROJECTIONS)
_UNGATED = "relu2"  # experts without a gate: Nemotron-H's
_AGAIN = "Download the model again; if its source is the same, the model is damaged or mislabelled"


@dataclass(frozen=True)
class Experts:
    """`count` experts per layer. Each token uses `per_token`. `intermediate` is their inner width."""

    count: int
    per_token: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.count} a layer, {self.per_token} a token, {self.intermediate} wide"


def read_experts(sizes: Mapping[str, object]) -> Experts | None:
    """The experts that a text model's config declares, under Qwen's, Mixtral's or DeepSeek's names; or None."""
    count = _first(sizes, "num_experts", "num_local_experts", "n_routed_experts")
    per_token = _first(sizes, "num_experts_per_tok")
    intermediate = _first(sizes, "moe_intermediate_size", "intermediate_size")
    return Experts(count, per_token, intermediate) if count and per_token and intermediate else None


@dataclass
class _Layer:
    quantized: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    found: set[tuple[int, str]] = field(default_factory=set)


def compare_experts(config: Mapping[str, object], modules: Modules) -> list[Finding]:
    """Finds experts that are missing, differ from the declared sizes, or are quantized in part."""
    text = config.get("text_config")
    sizes = text if isinstance(text, dict) else config
    declared = read_experts(sizes)
    findings: list[Finding] = []
    layers: dict[str, _Layer] = {}
    for modules_of_kind, quantized in ((modules.nvfp4, True), (modules.plain, False)):
        for module, (rows, columns, *_) in ((name, shape) for name, shape in modules_of_kind.items() if len(shape) > 1):
            if (match := EXPERT.match(module)) is None:
                continue
            layer = layers.setdefault(match["layer"], _Layer())
            (layer.quantized if quantized else layer.plain).append(module)
            layer.found.add((int(match["number"]), match["leaf"]))
            width = columns if match["leaf"] in _DOWN else rows
            if declared and width != declared.intermediate:
                expected = f"experts {declared.intermediate} wide, as config.json says"
                findings.append(error("shape", "", module, expected, f"[{rows}, {columns}]", _AGAIN))
    for name, layer in layers.items():
        if layer.quantized and layer.plain:
            got = f"{len(layer.plain)} of {len(layer.found)} projections in 16 bits: {list_some(layer.plain, 2)}"
            findings.append(error("fused", "", name, "a layer's experts to be quantized all or none", got, _AGAIN))
        leaves = _projections({leaf for _, leaf in layer.found}, sizes)
        if declared and leaves:
            wanted = {(number, leaf) for number in range(declared.count) for leaf in leaves}
            if missing := sorted(wanted - layer.found):
                expected = f"{declared.count} experts, as config.json says"
                got = f"none for {list_some(f'{number}.{leaf}' for number, leaf in missing)}"
                findings.append(error("absent-expert", "", name, expected, got, _AGAIN))
    return findings[:20]


def _projections(found: set[str], sizes: Mapping[str, object]) -> tuple[str, ...] | None:
    """What each expert has to have, in the names found; None under names that are unknown."""
    for gate, down, up in PROJECTIONS:
        if found <= {gate, down, up}:
            return (down, up) if sizes.get("mlp_hidden_act") == _UNGATED else (gate, down, up)
    return None


def _first(sizes: Mapping[str, object], *keys: str) -> int:
    values = (sizes.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
