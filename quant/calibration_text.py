"""Text to calibrate on and text to measure on. They are never the same.

Both defaults are part of Python, so nothing is downloaded. Calibration reads the source of some fifty modules of the
standard library, which mixes English prose (docstrings, comments) with code. Measuring reads the language reference
that `help()` shows (`pydoc_data.topics`). Both differ between Python versions, so results name the text's SHA-256.

A file is read as plain text or as JSONL. A JSONL object has `text`, or a chat's `messages`. The model's own template
turns messages into text, because training data has that form. The model never sees JSON's braces and quotes.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import QuantError

_MODULES = (
    "argparse",
    "ast",
    "asyncio.events",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "dis",
    "doctest",
    "enum",
    "fractions",
    "functools",
    "gettext",
    "heapq",
    "inspect",
    "logging",
    "operator",
    "optparse",
    "pathlib",
    "pdb",
    "pickle",
    "pickletools",
    "pprint",
    "random",
    "re",
    "shelve",
    "shutil",
    "smtplib",
    "socket",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unittest.mock",
    "urllib.parse",
    "uuid",
    "weakref",
    "zipfile",
)


@dataclass(frozen=True)
class Text:
    """A text and its source."""

    content: str
    source: str

    @property
    def sha256(self) -> str:
        """Of the content in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def calibration_text(path: Path | None = None, model: Path | None = None) -> Text:
    """The text of the file `path`, or the default. `model` is the directory whose template chats are rendered with.

    Raises QuantError when the file cannot be read, is empty, or is JSONL of another kind.
    """
    if path is not None:
        return _read(path, model)
    specs = [importlib.util.find_spec(module) for module in _MODULES]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin and spec.origin.endswith(".py")]
    parts = [Path(origin).read_text(encoding="utf-8") for origin in origins]
    return Text("\n\n".join(parts), f"the source of {len(parts)} modules of Python's standard library")


def evaluation_text(path: Path | None = None, model: Path | None = None) -> Text:
    """The text of the file `path`, or the default; as `calibration_text` reads it."""
    if path is not None:
        return _read(path, model)
    from pydoc_data.topics import topics

    return Text("\n\n".join(topics[name] for name in sorted(topics)), "Python's language reference (pydoc_data.topics)")


_SUPPORTED = (
    'Give plain text in UTF-8, or JSONL with one object a line: {"text": "…"} or {"messages": [{"role": "user", …}, …]}'
)
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


def _read(path: Path, model: Path | None) -> Text:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantError(f"{path}: expected a text file in UTF-8, got: {error}", _SUPPORTED) from None
    if not content.strip():
        raise QuantError(f"{path}: expected text, got an empty file", "Name another file")
    if path.suffix.lower() in _JSONL_SUFFIXES or _is_json(content):
        content = "\n\n".join(_documents(content, path, model))
        if not content.strip():
            raise QuantError(f"{path}: expected text, got objects without any", "Name another file")
    return Text(content, str(path))


def _is_json(content: str) -> bool:
    """Whether the first line is a JSON object, or all of it one JSON value of several lines."""
    return _is_object(content.lstrip().partition("\n")[0]) or isinstance(_parsed(content), dict | list)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_object(line: str) -> bool:
    return isinstance(_parsed(line), dict)


def _is_chat(messages: object) -> bool:
    """Whether it is a list of objects with roles. The template decides about their other keys."""
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)


def _documents(content: str, path: Path, model: Path | None) -> Iterator[str]:
    """The text of each line's object."""
    render: Callable[[Any], str] | None = None
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        if not _is_object(line):
            raise QuantError(f"{where}: expected a JSON object, got {line.strip()[:40]!r}…", _SUPPORTED)
        found = json.loads(line)
        if isinstance(found.get("text"), str):
            yield found["text"]
        elif _is_chat(found.get("messages")):
            render = render or _template_of(model, path)
            try:
                yield render(found["messages"])
            except Exception as error:
                # A template is a program. Any exception means that it refuses these messages.
                raise QuantError(
                    f"{where}: expected messages that the model's template takes, got: {error}", _SUPPORTED
                ) from None
        else:
            keys = ", ".join(map(repr, found)) or "nothing"
            raise QuantError(f"{where}: expected a string `text`, or `messages` with roles, got {keys}", _SUPPORTED)


def _template_of(model: Path | None, path: Path) -> Callable[[Any], str]:
    """A function from a chat's messages to text, by the template of the model in the directory `model`."""
    remedy = 'Render the chats to {"text": "…"} yourself'
    if model is None:
        raise QuantError(f"{path}: chats need a model directory, whose template makes text of them", remedy)
    from quant.transformers_model import load_tokenizer

    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        raise QuantError(f"{path}: chats need a chat template, and {model} has none", remedy)
    return lambda messages: str(tokenizer.apply_chat_template(messages, tokenize=False))
