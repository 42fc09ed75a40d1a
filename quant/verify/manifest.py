"""SHA256SUMS, in the form that `sha256sum --check` reads: a digest, two spaces, a file name; one file per line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from quant.errors import QuantError

FILE_NAME = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_REMEDY = "Download SHA256SUMS again, or remove it and write a new one with `voltserve verify --write-manifest`"


def read_manifest(directory: Path) -> dict[str, str]:
    """File name to hex digest; empty where there is no manifest. Raises QuantError naming a malformed line."""
    path = directory / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise QuantError(f"{path}: expected digests and file names, got {error}", _REMEDY) from None
    return parse_manifest(text, str(path))


def parse_manifest(text: str, where: str) -> dict[str, str]:
    """File name to hex digest. Raises QuantError naming `where` and a malformed line."""
    digests: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if not match or Path(match[2]).name != match[2] or match[2] in digests:
            raise QuantError(
                f"{where}: line {number}: expected a digest and a new file name, got {line[:80]!r}", _REMEDY
            )
        digests[match[2]] = match[1].lower()
    return digests


def write_manifest(directory: Path, digests: Mapping[str, str]) -> None:
    """Writes the manifest, whole or not at all."""
    partial = directory / f".{FILE_NAME}.partial"
    partial.write_text("".join(f"{digests[name]}  {name}\n" for name in sorted(digests)), encoding="utf-8")
    partial.replace(directory / FILE_NAME)


def listable(directory: Path) -> list[str]:
    """The files that a manifest lists: all but hidden ones and the manifest itself."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.name != FILE_NAME
    )
