"""Whether a model that also takes images and video is served with them."""

import json
from collections.abc import Mapping
from pathlib import Path

from server.config.flags import FlagValue
from server.decisions import Decision

FLAG = "language-model-only"
LIMITS = "limit-mm-per-prompt"
# On cards of at least this nominal size, an image encoder and its trial run leave enough room for a cache.
ROOMY_GIB = 24.0


def choose_text_only(model: Path, engine: Mapping[str, FlagValue], smallest_gib: float | None) -> Decision | None:
    """Decides to leave out a model's image encoder where no flag mentions it; None where everything is served.

    `smallest_gib`: the nominal memory of the smallest card used, None without GPUs.
    """
    if FLAG in engine or LIMITS in engine or not _has_vision(model):
        return None
    if smallest_gib is not None and smallest_gib >= ROOMY_GIB:
        return None
    where = f"a {smallest_gib:g} GB card needs the memory for its cache" if smallest_gib is not None else "on a CPU"
    return Decision("images and video", "not served", f"{where}; --no-{FLAG} loads the model's image encoder")


def is_text_only(engine: Mapping[str, FlagValue]) -> bool:
    """Whether the flags leave the image encoder out, so that the engine does not load it."""
    limits = engine.get(LIMITS)
    none_allowed = isinstance(limits, dict) and all(limits.get(kind) == 0 for kind in ("image", "video"))
    return engine.get(FLAG) is True or none_allowed


def _has_vision(model: Path) -> bool:
    """Preflight refuses an unreadable config.json."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("vision_config"), dict)
