"""Text to calibrate on and text to measure on, never the same.

Both defaults are there without a download. Calibration reads, about half and half, the descriptions of packages that
voltserve depends on (English prose with code in it) and modules of Python's standard library (code with prose in it);
measuring reads the language reference that `help()` shows (`pydoc_data.topics`). Their words differ between versions,
therefore results name the SHA-256 of what was read.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from pathlib import Path

from quant.errors import QuantError

_PACKAGES = (
    "accelerate",
    "fastapi",
    "gguf",
    "httpx",
    "numpy",
    "nvidia-ml-py",
    "pydantic",
    "rich",
    "structlog",
    "transformers",
    "typer",
    "uvicorn",
)
# The rest of a longer description is a list of changes.
_DESCRIPTION_CHARACTERS = 20_000
_MODULES = (
    "bisect",
    "contextlib",
    "csv",
    "fractions",
    "heapq",
    "shelve",
    "string",
    "textwrap",
)


@dataclass(frozen=True)
class Text:
    """A text and where it came from."""

    content: str
    source: str

    @property
    def sha256(self) -> str:
        """Of the content in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def calibration_text(path: Path | None = None) -> Text:
    """The text of the file `path`, or the default. Raises QuantError when it cannot be read or is empty."""
    if path is not None:
        return _read(path)
    prose = [_description(package)[:_DESCRIPTION_CHARACTERS] for package in _PACKAGES]
    code = [inspect.getsource(importlib.import_module(module)) for module in _MODULES]
    return Text("\n\n".join(prose + code), "descriptions of packages and modules of Python's standard library")


def _description(package: str) -> str:
    return str(importlib.metadata.metadata(package).json["description"])


def evaluation_text(path: Path | None = None) -> Text:
    """The text of the file `path`, or the default. Raises QuantError when it cannot be read or is empty."""
    if path is not None:
        return _read(path)
    from pydoc_data.topics import topics

    return Text("\n\n".join(topics[name] for name in sorted(topics)), "Python's language reference (pydoc_data.topics)")


def refuse_same(calibration: Text, evaluation_sha256: str) -> None:
    """Raises QuantError when a model would be measured on the text that it was calibrated on."""
    if calibration.sha256 == evaluation_sha256:
        raise QuantError(
            f"{calibration.source}: expected another text than the model was calibrated on, got the same",
            "Name a text that calibration did not see with --text",
        )


def _read(path: Path) -> Text:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantError(f"{path}: expected a text file in UTF-8, got: {error}", "Name another file") from None
    if not content.strip():
        raise QuantError(f"{path}: expected text, got an empty file", "Name another file")
    return Text(content, str(path))
