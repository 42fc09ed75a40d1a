"""The error catalogue, `configs/errors.yaml`, and its use: a pure function from an engine's end to a diagnosis."""

import functools
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from server.errors import ConfigError

CATALOGUE = Path(__file__).parents[2] / "configs" / "errors.yaml"
DOCS = "docs/troubleshooting.md"

Kind = Literal["configuration", "model", "memory", "gpu", "communication", "environment", "timeout", "engine"]

# The exit code of `voltserve serve` when it ends while the engine is down, named after sysexits.h.
EXIT_CODES: dict[Kind, int] = {
    "configuration": 78,  # EX_CONFIG
    "model": 65,  # EX_DATAERR
    "memory": 71,  # EX_OSERR
    "gpu": 74,  # EX_IOERR
    "communication": 76,  # EX_PROTOCOL
    "environment": 72,  # EX_OSFILE
    "timeout": 75,  # EX_TEMPFAIL
    "engine": 70,  # EX_SOFTWARE
}
UNKNOWN_EXIT_CODE = EXIT_CODES["engine"]

# Whether a start that failed may work when it is tried again; an entry's own `retry` beats its kind's. Settings and the
# model's files are the same at the next start. Whatever else fails may have been taken by others (memory, a GPU, the
# disk), lost by chance (a link, a step), or be unknown.
RETRIED: dict[Kind, bool] = {kind: kind not in {"configuration", "model"} for kind in EXIT_CODES}

# What stands before a line's own text: "(EngineCore pid=7) ERROR 11-29 21:39:27 [core.py:12] ", each part optional.
_HEAD = re.compile(r"^(?:\([^)]*\) *)*(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] )?")
# Lines that say themselves that nothing failed: of logging, and of torch's own log ("W1201 03:51:18 …"). Python's
# `warnings` are not among them: torch reports with them why it found no GPU.
_HARMLESS = re.compile(r"^(?:\([^)]*\) *)*(?:(?:DEBUG|INFO|WARNING)\b|(?:\[rank\d+\]:)?\[?[IVW]\d{4} )")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Evidence(_Strict):
    """A `file` below site-packages that has the message's `text`."""

    file: str = Field(min_length=1)
    text: str = Field(min_length=1)


class Entry(_Strict):
    """One kind of failure; configs/errors.yaml says what each key means."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    title: str = Field(min_length=1)
    kind: Kind
    lines: tuple[str, ...] = ()
    exit: str = ""
    also: str = ""
    retry: bool | None = None
    cause: str = Field(min_length=1)
    remedy: tuple[str, ...] = Field(min_length=1)
    evidence: tuple[Evidence, ...] = ()

    @field_validator("lines", "exit", "also")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...] | str) -> tuple[str, ...] | str:
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a pattern: {error}") from error
        return patterns

    @property
    def retried(self) -> bool:
        """Whether an engine that failed so at its start is started again."""
        return RETRIED[self.kind] if self.retry is None else self.retry

    def find(self, ending: "Ending") -> str | None:
        """The line, fault or exit that this entry matches, without any client's text."""
        if self.also and not any(re.search(self.also, line) for line in ending.lines):
            return None
        for line in ending.lines:
            if any(re.search(pattern, line) for pattern in self.lines):
                return line
        for fault in ending.faults:
            # From its beginning: a client's text can only be inside a message.
            if any(re.match(pattern, text) for pattern in self.lines for text in fault.beginnings):
                return str(fault)
        return ending.exit if self.exit and re.search(self.exit, ending.exit) else None


class Catalogue(_Strict):
    """The file; of several entries that match the first counts."""

    schema_version: Literal[1] = Field(alias="schema")
    errors: tuple[Entry, ...]


@dataclass(frozen=True)
class Fault:
    """The cause of a process's end: an exception of `type`; without a type, `message` is the engine's own text."""

    type: str
    message: str

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Where a pattern may begin to match."""
        bare = self.type.rpartition(".")[2]
        return (self.message, f"{bare}: {self.message}", f"{self.type}: {self.message}")

    def __str__(self) -> str:
        """Without any client's text: an exception's message may repeat it."""
        return f"{self.type} (its message is in the log)" if self.type else self.message


@dataclass(frozen=True)
class Ending:
    """The known facts of an engine's end: `exit` as the supervisor describes it, and its processes' reports.

    lines: of its log, without their heads; none once it has served, since they may contain clients' text.
    faults: reports by its processes.
    """

    exit: str
    lines: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, exit_text: str, lines: Iterable[str], faults: Iterable[Fault] = ()) -> "Ending":
        """From lines as the engine wrote them; those that it wrote as warnings or less are no errors."""
        errors = tuple(_HEAD.sub("", line).strip() for line in lines if not _HARMLESS.match(line))
        return cls(exit_text, errors, tuple(faults))


@dataclass(frozen=True)
class Diagnosis:
    """The entry that matched, and the `found` text that it matched. `docs`: where it is described.

    `retry`: whether a start that failed so may work when it is tried again.
    """

    id: str
    title: str
    kind: Kind
    cause: str
    remedy: tuple[str, ...]
    found: str
    retry: bool = True

    @property
    def docs(self) -> str:
        """Where the page has it."""
        return f"{DOCS}#{self.id}"

    @property
    def exit_code(self) -> int:
        """That of the kind."""
        return EXIT_CODES[self.kind]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "docs": self.docs, "exit_code": self.exit_code}


@functools.cache
def load_catalogue(path: Path = CATALOGUE) -> tuple[Entry, ...]:
    """The entries in order.

    Raises:
        ConfigError: not a catalogue, or an id twice; names the file and key.
    """
    try:
        entries = Catalogue.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).errors
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    ids = [entry.id for entry in entries]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ConfigError(f"{path}: id {twice[0]} stands twice")
    for entry in entries:
        if not entry.lines and not entry.exit:
            raise ConfigError(f"{path}: {entry.id}: expected lines or exit, got neither")
    return entries


def diagnose(ending: Ending, entries: tuple[Entry, ...] | None = None) -> Diagnosis | None:
    """The first entry that matches, or None: then the log has to speak for itself."""
    for entry in load_catalogue() if entries is None else entries:
        found = entry.find(ending)
        if found is not None:
            return Diagnosis(entry.id, entry.title, entry.kind, entry.cause, entry.remedy, found, entry.retried)
    return None
