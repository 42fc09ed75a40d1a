"""Which tensors of a checkpoint are quantized, which stay in 16 bits and why, and which share a global."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.errors import QuantError

if TYPE_CHECKING:  # verifying imports this module without torch
    from quant.safetensors_file import TensorInfo

# Modules that stay in 16 bits by default, in compressed-tensors' syntax: a module's name, or after "re:" a pattern that
# matches from the name's start. Embeddings are looked up, heads decide tokens directly, and routers pick experts.
# Vision and audio towers are small and sensitive. MTP layers only draft.
DEFAULT_IGNORE = (
    "re:.*lm_head",
    "re:.*embed",
    "re:.*norm",
    "re:.*router",
    r"re:.*\.gate$",
    "re:.*shared_expert_gate",
    "re:.*visual",
    "re:.*vision",
    "re:.*audio",
    "re:.*multi_modal_projector",
    "re:.*mtp",
)

# Layers that engines fuse into one. They get one global for all members. Every engine then reads them exactly, even one
# that keeps only the largest global of a fused layer.
FUSED_LAYERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True)
class Selection:
    """Module names to quantize (`linears`) and tensor names to keep with the reason (`kept`)."""

    linears: tuple[str, ...]
    kept: Mapping[str, str]


def matching_pattern(module: str, ignore: Iterable[str]) -> str | None:
    """The first of `ignore` that names `module`, by compressed-tensors' rules, or None."""
    for pattern in ignore:
        if re.match(pattern[3:], module) if pattern.startswith("re:") else pattern == module:
            return pattern
    return None


def select(tensors: Mapping[str, TensorInfo], group_size: int, ignore: tuple[str, ...]) -> Selection:
    """Linears are 2-D float tensors named `*.weight`, not ignored, whose K is a multiple of `group_size`.

    Raises QuantError for a bad pattern, and when a fused layer would be only partly quantized.
    """
    try:
        reasons = {name: _reason_to_keep(name, info, group_size, ignore) for name, info in tensors.items()}
    except re.error as error:
        raise QuantError(f"ignore: {error.pattern!r} is not a pattern: {error}", "See Python's `re` syntax") from None
    kept = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in kept.items():
        module = name.removesuffix(".weight")
        for sibling in siblings(module):
            if sibling != module and not reasons.get(f"{sibling}.weight", "absent"):
                raise QuantError(
                    f"{name} stays in 16 bits ({reason}) but {sibling}.weight does not, and engines fuse them",
                    "Ignore both or neither",
                )
    _refuse_misspelt(tensors, ignore)
    return Selection(tuple(name.removesuffix(".weight") for name, reason in reasons.items() if not reason), kept)


def _refuse_misspelt(tensors: Mapping[str, TensorInfo], ignore: Iterable[str]) -> None:
    """Refuses a user's pattern without a match: the layer that was meant would be quantized, unseen. Defaults may match
    nothing.
    """
    modules = [name.removesuffix(".weight") for name in tensors]
    for pattern in ignore:
        if pattern in DEFAULT_IGNORE or any(matching_pattern(module, (pattern,)) for module in modules):
            continue
        near = difflib.get_close_matches(pattern, modules, n=1, cutoff=0)[0]
        raise QuantError(
            f"ignore: expected a layer of this model, got {pattern!r}, which matches none",
            f"The nearest name is {near}; re:PATTERN matches from a name's start",
        )


def siblings(module: str) -> tuple[str, ...]:
    """The modules an engine fuses with `module`, itself among them, always in the same order; just it if none."""
    parent, dot, leaf = module.rpartition(".")
    for members in FUSED_LAYERS:
        if leaf in members:
            return tuple(parent + dot + member for member in members)
    return (module,)


def _reason_to_keep(name: str, info: TensorInfo, group_size: int, ignore: tuple[str, ...]) -> str | None:
    if not name.endswith(".weight") or len(info.shape) != 2 or not info.dtype.is_floating_point:
        return "not a 2-D float weight"
    if pattern := matching_pattern(name.removesuffix(".weight"), ignore):
        return f"ignored by {pattern!r}"
    if info.shape[1] % group_size or not info.shape[1]:
        return f"K={info.shape[1]} is not a multiple of {group_size}"
    return None
