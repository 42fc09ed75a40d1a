"""The result of each point, one line each in `sweep.jsonl`, so that a stopped sweep continues.

The first line has the conditions of the measurement; other conditions make another sweep. Axes are no part of the
conditions, so values may be added later.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from server.errors import ConfigError
from server.sweep.grid import Point

FILE = "sweep.jsonl"
Status = Literal["measured", "skipped", "failed"]


@dataclass(frozen=True)
class Record:
    """A point's result. `reason` where it was skipped or failed; `levels` as in bench.json where it was measured."""

    point: Mapping[str, Any]
    status: Status
    reason: str = ""
    diagnosis: Mapping[str, Any] | None = None
    ready_s: float | None = None
    levels: tuple[Mapping[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """Equal for equal points, whatever the order of their axes."""
        return key_of(self.point)


def key_of(point: Mapping[str, Any]) -> str:
    """A point's key."""
    return json.dumps(dict(point), sort_keys=True)


class Store:
    """The file. Opening it reads what is there.

    Raises:
        ConfigError: the folder holds a sweep under other conditions, or no sweep's file.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.records: dict[str, Record] = {}
        wanted = json.loads(json.dumps(dict(conditions)))
        if not self.path.exists() or not self.path.stat().st_size:
            self._append({"conditions": wanted})
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # a partly written line: that point is measured again
            lines.pop()
            self.path.write_text("".join(lines), encoding="utf-8")
            if not lines:
                self._append({"conditions": wanted})
                return
        values = [self._parse(number, line) for number, line in enumerate(lines, 1)]
        found = values[0].get("conditions")
        if found != wanted:
            differing = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
            differences = "; ".join(
                f"{name}: expected {wanted[name]}, got {(found or {}).get(name)}" for name in differing
            )
            raise ConfigError(f"{self.path} is a sweep under other conditions ({differences}); choose another --out")
        for value in values[1:]:
            record = Record(**{**value, "levels": tuple(value["levels"])})
            self.records[record.key] = record

    def find(self, point: Point) -> Record | None:
        """A point's record, if any."""
        return self.records.get(key_of(dict(point.values)))

    def add(self, record: Record) -> None:
        """Keeps a record, on disk before this returns."""
        self.records[record.key] = record
        self._append(vars(record))

    def _append(self, value: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _parse(self, number: int, line: str) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{self.path}, line {number}: not JSON: {error}; mend it, or choose another --out"
            ) from error
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}, line {number}: expected an object, got {type(value).__name__}")
        return value
