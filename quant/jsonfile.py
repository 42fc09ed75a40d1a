"""JSON objects in files: strict reading with errors that name the file and key, and stable writing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from quant.errors import QuantError

T = TypeVar("T")

_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}
_LONGEST = 100  # characters of a value that a message quotes


def show(value: object) -> str:
    """A JSON value for a message: as JSON writes it, text in single quotes, cut where it is long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def read_object(path: Path, remedy: str) -> dict[str, object]:
    """The JSON object in `path`. Raises QuantError when the file is missing, not JSON or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuantError(f"{path} is missing", remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        raise QuantError(f"{path}: expected a JSON object, got {error}", remedy) from None
    if not isinstance(data, dict):
        raise QuantError(f"{path}: expected a JSON object, got {_KINDS.get(type(data), 'null')}", remedy)
    return data


def field(data: Mapping[str, object], key: str, kind: type[T], source: str, remedy: str) -> T:
    """`data[key]`, which must be a `kind` (a bool is no int). Raises QuantError naming `source` and the key."""
    if key not in data:
        raise QuantError(f"{source}: {key}: expected {_KINDS[kind]}, got nothing", remedy)
    value = data[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise QuantError(f"{source}: {key}: expected {_KINDS[kind]}, got {show(value)}", remedy)
    return value


def optional(data: Mapping[str, object], key: str, kind: type[T], source: str, remedy: str) -> T | None:
    """`field`, or None where the key is missing or null."""
    return None if data.get(key) is None else field(data, key, kind, source, remedy)


def refuse_unknown(data: Mapping[str, object], known: tuple[str, ...], source: str, remedy: str) -> None:
    """Raises QuantError for the first key of `data` that is not `known`."""
    for key in data:
        if key not in known:
            raise QuantError(f"{source}: {key}: expected one of {', '.join(known)}, got an unknown key", remedy)


def write_object(path: Path, data: Mapping[str, object]) -> None:
    """Writes `data` as indented UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
