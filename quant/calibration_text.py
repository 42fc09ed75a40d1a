"""Text to calibrate on and text to measure on, never the same.

Both defaults come with Python, so that they are there without a download: calibration reads the source of some fifty
modules of the standard library, which mixes English prose (docstrings, comments) with code; measuring reads the
language reference that `help()` shows (`pydoc_data.topics`). Their words differ between Python versions, therefore
results name the SHA-256 of what was read.
"""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

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
    specs = [importlib.util.find_spec(module) for module in _MODULES]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin and spec.origin.endswith(".py")]
    parts = [Path(origin).read_text(encoding="utf-8") for origin in origins]
    return Text("\n\n".join(parts), f"the source of {len(parts)} modules of Python's standard library")


def evaluation_text(path: Path | None = None) -> Text:
    """The text of the file `path`, or the default. Raises QuantError when it cannot be read or is empty."""
    if path is not None:
        return _read(path)
    from pydoc_data.topics import topics

    return Text("\n\n".join(topics[name] for name in sorted(topics)), "Python's language reference (pydoc_data.topics)")


def _read(path: Path) -> Text:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantError(f"{path}: expected a text file in UTF-8, got: {error}", "Name another file") from None
    if not content.strip():
        raise QuantError(f"{path}: expected text, got an empty file", "Name another file")
    return Text(content, str(path))
