"""Outlines: directories of a model whose configs and headers are there, and whose weights are holes.

The file `.outline.json` in one lists the files whose content, apart from a shard's header, is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quant.jsonfile import field, read_object, write_object

FILE_NAME = ".outline.json"
_REMEDY = "Make the outline again"


def write_outline(directory: Path, holes: Iterable[str]) -> None:
    """Marks a directory as an outline."""
    write_object(directory / FILE_NAME, {"holes": sorted(holes)})


def holes_of(directory: Path) -> frozenset[str]:
    """The files whose content is not there; empty for a whole model. Raises QuantError for a broken mark."""
    path = directory / FILE_NAME
    if not path.exists():
        return frozenset()
    return frozenset(map(str, field(read_object(path, _REMEDY), "holes", list, str(path), _REMEDY)))
