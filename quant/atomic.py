"""Directories that appear whole or not at all.

A run works in `.NAME.XXXXXXXX.partial` beside its destination, and holds a lock on that folder. The kernel frees the
lock when the process dies. So the next run knows which folders are abandoned.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quant.errors import QuantError


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yields a new folder beside `destination` (same file system), synced and renamed to it on success.

    On any error or Ctrl-C the folder is removed. Folders that killed runs left for this destination are removed too.
    Raises QuantError where `destination` exists and is not an empty folder, and where the file system fails.
    """
    remedy = "Name another destination, or remove this one first"
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise QuantError(f"{destination} exists and is not a folder", remedy)
    if destination.is_dir() and any(destination.iterdir()):
        raise QuantError(f"{destination} exists and is not empty", remedy)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(destination)
        partial, lock = _make_locked(destination)
    except OSError as error:
        raise QuantError(f"{destination} cannot be made: {error}", "Name a destination that can be written") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        sync_tree(partial)
        partial.rename(destination)
        sync_one(destination.parent)
    except OSError as error:
        raise QuantError(f"{destination} was not written: {error}", "Check free space and permissions") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def lock_folder(folder: Path) -> int | None:
    """A descriptor that holds `folder`'s lock until closed or the process ends; None if another run holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make_locked(destination: Path) -> tuple[Path, int]:
    """A new partial folder and its lock. Tries again if another run removed the folder between the two steps."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent))
        lock = lock_folder(partial)
        if lock is not None and partial.exists():
            return partial, lock
        if lock is not None:
            os.close(lock)


def _remove_abandoned(destination: Path) -> None:
    """Removes the partial folders of killed runs: of this destination, of this user, and without a lock."""
    ours = re.compile(rf"\.{re.escape(destination.name)}\.[a-z0-9_]{{8}}\.partial")
    for path in list(destination.parent.iterdir()):
        if not ours.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = lock_folder(path) if path.stat().st_uid == os.getuid() else None
        except OSError:  # removed already, or a file system without locks
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _umask() -> int:
    """The process's umask, which can only be read by setting it (mkdtemp makes folders private)."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_tree(directory: Path) -> None:
    """Has the disk hold a folder and all that is in it."""
    for path in directory.rglob("*"):
        sync_one(path)
    sync_one(directory)


def sync_one(path: Path) -> None:
    """Has the disk hold a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
