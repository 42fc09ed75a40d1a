"""The architectures that the engine has models for, read from configs/engine_architectures.json. Torch-free.

`scripts/engine_architectures.py` makes the file from the installed vLLM and our plugins. A test compares them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).parents[1] / "configs" / "engine_architectures.json"
MANY_NAMES = 4  # a config with more is not quoted whole

_WHAT_IT_IS = {
    "pools": "a model that gives embeddings or scores, and no text",
    "drafts": "a model that drafts for another, and serves nothing alone",
}


@dataclass(frozen=True)
class Known:
    """The file: each architecture's kind, and its checkpoints' names for an expert's gate, down and up, if any."""

    vllm: str
    kinds: Mapping[str, str]
    experts: Mapping[str, tuple[tuple[str, ...], ...]]
    removed: Mapping[str, str]


@lru_cache(maxsize=1)
def known() -> Known:
    """The file's contents."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    entries = data["architectures"]
    return Known(
        data["vllm"],
        {name: entry["kind"] for name, entry in entries.items()},
        {name: tuple(map(tuple, entry["experts"])) for name, entry in entries.items() if "experts" in entry},
        data["removed"],
    )


@dataclass(frozen=True)
class Unknown:
    """Why an architecture has no model here: expected, got and remedy, as a finding has them."""

    expected: str
    got: str
    remedy: str


def judge(names: object) -> Unknown | None:
    """Why no model here fits a config's `architectures`. None if the engine generates text with one of them."""
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        got = "nothing" if not names else json.dumps(names)[:80]
        return Unknown("the name of the model's class in a list", got, "Restore config.json from the model's source")
    table = known()
    expected = f"an architecture that vLLM {table.vllm} generates text with"
    if any(table.kinds.get(name) == "generates" for name in names):
        return None
    first = names[0]
    listed = ", ".join(names[:MANY_NAMES])
    if (kind := table.kinds.get(first)) is not None:
        return Unknown(expected, f"{listed}, {_WHAT_IT_IS[kind]}", "Choose a model that generates text")
    if (last := table.removed.get(first)) is not None:
        return Unknown(expected, f"{listed}, which vLLM had until {last}", "Choose another model")
    near = nearest(first)
    hint = f"; the nearest known {'are' if len(near) > 1 else 'is'} {' and '.join(near)}" if near else ""
    return Unknown(
        expected,
        f"{listed}{hint}",
        "Choose a version of the model that was saved with its whole class; --model-impl transformers tries "
        "transformers' own code",
    )


def nearest(name: str) -> Sequence[str]:
    """The known architectures with the nearest names. Those with the same beginning come first."""
    generating = [other for other, kind in known().kinds.items() if kind == "generates"]
    stem = name.partition("For")[0]
    same = [other for other in generating if other.partition("For")[0] == stem]
    return same[:2] or difflib.get_close_matches(name, generating, n=2, cutoff=0.75)


def expert_names(names: object) -> tuple[tuple[str, ...], ...]:
    """The names under which the engine's model reads an expert's gate, down and up. Empty if unknown."""
    listed = names if isinstance(names, list) else []
    return next((known().experts[name] for name in listed if name in known().experts), ())
