"""Directories that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quant.errors import QuantError


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yields a new folder beside `destination` (same file system), synced and renamed to it on success.

    On any error or Ctrl-C the folder is removed. Raises QuantError when `destination` exists and is not an empty
    folder, which it never replaces, and for a failing file system.
    """
    remedy = "Name another destination, or remove this one first"
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise QuantError(f"{destination} exists and is not a folder", remedy)
    if destination.is_dir() and any(destination.iterdir()):
        raise QuantError(f"{destination} exists and is not empty", remedy)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent))
    except OSError as error:
        raise QuantError(f"{destination} cannot be made: {error}", "Name a destination that can be written") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        _sync(partial)
        partial.rename(destination)
        _sync_one(destination.parent)
    except OSError as error:
        raise QuantError(f"{destination} was not written: {error}", "Check free space and permissions") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it (mkdtemp makes folders private)."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync_one(path)
    _sync_one(directory)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
