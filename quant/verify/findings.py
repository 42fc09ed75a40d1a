"""Findings of a verification."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from quant.errors import QuantError
from quant.safetensors_header import HeaderError

# error: the model must not be served. warning: it can be served, but something is odd. info: worth knowing.
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One finding. `file` and `tensor` are empty if it concerns the whole model. `check` names its kind."""

    severity: Severity
    check: str
    file: str
    tensor: str
    expected: str
    got: str
    remedy: str

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.tensor) if part)
        return f"{where}: expected {self.expected}, got {self.got}. {self.remedy}".removeprefix(": ")

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def error(check: str, file: str, tensor: str, expected: str, got: str, remedy: str) -> Finding:
    """A finding that forbids serving."""
    return Finding("error", check, file, tensor, expected, got, remedy)


def warning(check: str, file: str, tensor: str, expected: str, got: str, remedy: str) -> Finding:
    """A finding with which serving works."""
    return Finding("warning", check, file, tensor, expected, got, remedy)


def info(check: str, file: str, tensor: str, expected: str, got: str, remedy: str) -> Finding:
    """A finding that is worth knowing."""
    return Finding("info", check, file, tensor, expected, got, remedy)


def from_exception(check: str, caught: QuantError) -> Finding:
    """The error that a reader raised."""
    if isinstance(caught, HeaderError):
        return error(check, caught.path.name, caught.tensor, caught.expected, caught.got, caught.remedy)
    where, _, rest = caught.problem.partition(": expected ")
    expected, _, got = rest.partition(", got ")
    if not got:
        return error(check, "", "", "a model that can be read", caught.problem, caught.remedy)
    path, colon, key = where.partition(": ")
    return error(check, Path(path).name + colon + key, "", expected, got, caught.remedy)


def list_some(names: Iterable[str], count: int = 5) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
