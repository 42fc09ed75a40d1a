"""Selects the Pareto front and the best point, and makes that one a preset."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from server.config.flags import FlagValue
from server.config.presets import Preset, load_preset
from server.config.settings import Config
from server.sweep.store import Record


@dataclass(frozen=True)
class Candidate:
    """A measured point under one level of load: `total` tokens per second, and `user`'s (median)."""

    record: Record
    level: str
    total: float
    user: float

    def __str__(self) -> str:
        point = " ".join(f"{name}={value}" for name, value in self.record.point.items())
        return f"{point}: {self.total:.1f} tok/s at {self.level}, {self.user:.1f} a user"


def candidates(records: Iterable[Record]) -> list[Candidate]:
    """Every level of every point that was measured."""
    return [
        Candidate(record, level["level"], level["tokens_per_s"], level["user_tokens_per_s"])
        for record in records
        if record.status == "measured"
        for level in record.levels
        if level["user_tokens_per_s"] is not None
    ]


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """The points that no other beats in both total and user speed, by falling total."""
    front: list[Candidate] = []
    for one in sorted(found, key=lambda candidate: (-candidate.total, -candidate.user)):
        if not front or one.user > front[-1].user:
            front.append(one)
    return front


def winner(found: Sequence[Candidate], least_user: float) -> Candidate | None:
    """The largest total where each user still gets `least_user` tokens per second."""
    return max((one for one in found if one.user >= least_user), key=lambda one: (one.total, one.user), default=None)


def as_preset(base: Preset, config: Config, chosen: Candidate, measured: str) -> dict[str, Any]:
    """The winner as a preset's data: the base preset, the flags given to the sweep, and the point.

    A varied number becomes a limit with provenance `measured`; `measured` is its source.
    """
    point = dict(chosen.record.point)
    engine: dict[str, FlagValue] = {name: value for name, value in base.engine.items() if name not in point}
    limits = {name: limit.model_dump() for name, limit in base.limits.items() if name not in point}
    for name, value in config.engine.items():
        if config.sources[name] == "command line" and name not in point:
            limits.pop(name, None)
            engine[name] = value
    variables = {
        name: value if isinstance(value, str) else value.model_dump(exclude_none=True)
        for name, value in base.env.items()
    }
    for name, value in point.items():
        if name.isupper():
            variables[name] = str(value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            engine[name] = value
        else:
            limits[name] = {"value": value, "provenance": "measured", "source": measured}
    return {
        "schema": 1,
        "name": f"{base.name}-swept",
        "description": f"{base.description}; the fastest of a sweep",
        "match": None if base.match is None else base.match.model_dump(),
        "engine": engine,
        "limits": limits,
        "env": variables,
    }


def write_preset(folder: Path, data: Mapping[str, Any], about: str) -> Path:
    """Writes a preset's data as a file that `--preset FILE` takes, and reads it back to be sure of that."""
    path = folder / f"{data['name']}.yaml"
    text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=110)
    path.write_text(f"# {about}\n{text}", encoding="utf-8")
    load_preset(path)
    return path
