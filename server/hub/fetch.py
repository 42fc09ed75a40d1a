"""A whole model from a hub into a directory, which is complete or visibly not.

The files collect in `DIR.incomplete`, beside DIR, under a lock. When all are there and checked, SHA256SUMS and the
record of the source are written, everything is synced, and the folder is renamed to DIR. A run that was killed, cut off
or out of room goes on from what it has when the same command is given again.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from quant.atomic import lock_folder, sync_one, sync_tree
from quant.progress import OnProgress, Progress, ignore_progress
from quant.verify.manifest import write_manifest
from server.errors import HubError
from server.hub.http import client_of, get_bytes
from server.hub.listing import Listing, RemoteFile, list_files
from server.hub.record import STATE, State, key_of, read_record, read_state, write_record
from server.hub.selection import INDEX_LIMIT, Selection, index_of, left_out_text, listed_shards, select, size_text
from server.hub.source import Source
from server.hub.transfer import PART, Digests, StoppedError, Transfer, WrongBytesError

INCOMPLETE = ".incomplete"
PARALLEL = 4
MARGIN = 64 << 20  # bytes that stay free
_BAR_FROM = 8 << 20  # smaller files have no bar of their own
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """What a fetch did."""

    directory: Path
    what: str
    files: int
    size: int
    left_out: tuple[str, ...]
    already_there: bool = False

    def as_text(self) -> str:
        """For people: what is there, what was left out."""
        if self.already_there:
            return f"{self.directory} has {self.what} already; name another directory for another revision"
        head = f"{self.directory}: {self.what}, {self.files} files, {size_text(self.size)}, every digest in SHA256SUMS"
        return "\n".join((head, *self.left_out))


def fetch(
    source: Source,
    directory: Path,
    *,
    parallel: int = PARALLEL,
    bars: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> Fetched:
    """Fetches a model. `bars`: progress of each large file, too, not only of all together. Raises HubError."""
    if there := _already_there(source, directory):
        return there
    with _folder_of(directory) as folder, client_of(source) as client:
        state = _state(source, folder)
        listing = list_files(source.at(state.revision) if state and source.kind == "hf" else source)
        state = state or State(key_of(source), source.revision, listing.revision)
        selection, _ = selection_of(client, listing)
        _remove_others(folder, selection, state)
        meter = _Meter(selection, on_progress, bars=bars)
        missing = _missing(folder, selection, state, meter)
        _refuse_full_disk(folder, missing)
        _transfer(Transfer(client, listing.source, folder, meter.advance), missing, state, parallel)
        meter.end()
        digests = {file.name: state.done[file.name].sha256 for file in selection.kept}
        _finish(folder, directory, Listing(source, listing.revision, listing.files), selection, digests)
    return Fetched(
        directory, str(listing), len(selection.kept), selection.size, tuple(left_out_text(selection.left_out))
    )


def unfinished(directory: Path) -> Path:
    """Where the files of `directory` collect."""
    return directory.with_name(f"{directory.name}{INCOMPLETE}")


def selection_of(client: httpx.Client, listing: Listing) -> tuple[Selection, bytes]:
    """What serving needs of the files listed; and the index of shards, b"" without one. Raises HubError."""
    index = index_of(listing)
    if index is None:
        return select(listing, None), b""
    body = get_bytes(client, listing.source, index.url, min(INDEX_LIMIT, index.size))
    digests = Digests(index)
    digests.update(body)
    try:
        digests.check(index)
    except WrongBytesError as error:
        raise HubError(f"{listing}: {index.name}: {error}; try again, or another --endpoint") from None
    return select(listing, listed_shards(body, str(listing))), body


def _already_there(source: Source, directory: Path) -> Fetched | None:
    """The result where `directory` is this model. Raises HubError where it is something else."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise HubError(f"{directory}: expected a directory or nothing, got something else; name another")
    if not directory.exists() or not any(directory.iterdir()):
        return None
    record = read_record(directory)
    if record is None:
        raise HubError(f"{directory}: expected an empty directory or nothing, got files; name another, or remove it")
    same = record.get("source") == key_of(source)
    if not same or source.revision not in (record.get("asked"), record.get("revision")):
        have = f"{record.get('source')}@{record.get('revision')}"
        raise HubError(f"{directory}: expected nothing, got {have}; name another directory for {source}")
    with suppress(OSError):  # a kill between renaming and the end leaves it, which does no harm
        (directory / STATE).unlink(missing_ok=True)
    what = str(source.at(str(record.get("revision") or "")))
    return Fetched(directory, what, 0, 0, (), already_there=True)


@contextmanager
def _folder_of(directory: Path) -> Iterator[Path]:
    """The unfinished folder beside `directory`, locked for this run. Raises HubError."""
    if not directory.name:
        raise HubError(f"{directory}: expected the name of a directory to make")
    folder = unfinished(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise HubError(
            f"{folder}: cannot be made: {error.strerror}; "
            f"name a directory in a folder that this user ({os.getuid()}) may write"
        ) from None
    if lock is None:
        raise HubError(f"{folder} is in use: another run fetches {directory}; wait for it, or stop it first")
    try:
        if not folder.is_dir():
            raise HubError(f"{folder}: another run has just finished; give the command again")
        yield folder
    except OSError as error:
        raise HubError(f"{error.filename or folder}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            folder.rmdir()  # nothing has arrived
        os.close(lock)


def _state(source: Source, folder: Path) -> State | None:
    """The state that an earlier run left. Raises HubError where it was another model's."""
    state = read_state(folder)
    if state is None:
        return None
    if state.source != key_of(source) or source.revision not in (state.asked, state.revision):
        at = f"@{state.asked or state.revision}"
        raise HubError(
            f"{folder} is an unfinished fetch of {state.source}{at}; finish or remove it, or name another DIR"
        )
    return state


def _remove_others(folder: Path, selection: Selection, state: State) -> None:
    """Removes what is no part of this model, such as a file that the hub has renamed or changed since."""
    versions = {file.name: file.version for file in selection.kept}
    names = {name for name, version in versions.items() if version and state.versions.get(name) == version}
    for path in folder.iterdir():
        if path.name == STATE or path.name in names or path.name.removesuffix(PART) in names:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    state.versions = versions
    state.save(folder)


def _missing(folder: Path, selection: Selection, state: State, meter: "_Meter") -> list[tuple[RemoteFile, int]]:
    """The files that are not whole yet, each with the bytes of it that are there."""
    missing = []
    for file in selection.kept:
        digest = state.digest_of(folder, file) or _rehashed(folder, file)
        if digest is not None:
            state.note(folder, file.name, digest)
            meter.advance(file, file.size)
            continue
        path, part = folder / file.name, folder / f"{file.name}{PART}"
        path.unlink(missing_ok=True)
        have = min(part.lstat().st_size, file.size) if os.path.lexists(part) else 0
        meter.advance(file, have)
        missing.append((file, have))
    return missing


def _rehashed(folder: Path, file: RemoteFile) -> str | None:
    """The digest of a file that was named before a kill, if it is the hub's; None otherwise."""
    path = folder / file.name
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
        return None
    digests = Digests(file)
    with path.open("rb") as input_:
        while chunk := input_.read(_CHUNK):
            digests.update(chunk)
    try:
        digests.check(file)
    except WrongBytesError:
        return None
    return digests.sha256


def _refuse_full_disk(folder: Path, missing: list[tuple[RemoteFile, int]]) -> None:
    need = sum(file.size - have for file, have in missing)
    free = shutil.disk_usage(folder).free
    if need and need + MARGIN > free:
        raise HubError(
            f"{folder}: {need / 1e9:.2f} GB are to be fetched and {free / 1e9:.2f} GB are free; "
            f"make room for {(need + MARGIN - free) / 1e9:.2f} GB more, or name a directory on another disk"
        )


def _transfer(transfer: Transfer, missing: list[tuple[RemoteFile, int]], state: State, parallel: int) -> None:
    """Fetches the missing files, several at once. The first that fails stops the others. Raises its error."""
    lock = threading.Lock()

    def one(file: RemoteFile) -> None:
        digest = transfer.fetch(file)
        with lock:
            state.note(transfer.folder, file.name, digest)

    with ThreadPoolExecutor(parallel) as pool:
        futures: list[Future[None]] = [pool.submit(one, file) for file, _ in missing]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # Ctrl-C too
            transfer.stop.set()
            for future in futures:
                future.cancel()
        errors = [future.exception() for future in futures if future.done() and not future.cancelled()]
    failed = [error for error in errors if error is not None]
    if failed:
        raise next((error for error in failed if not isinstance(error, StoppedError)), failed[0])


def _finish(folder: Path, directory: Path, listing: Listing, selection: Selection, digests: dict[str, str]) -> None:
    write_manifest(folder, digests)
    write_record(folder, listing, selection, digests)
    folder.chmod(0o755)
    sync_tree(folder)
    try:
        folder.rename(directory)
    except OSError as error:
        raise HubError(
            f"{directory}: everything is in {folder}, but it cannot be renamed: {error.strerror}; "
            "name a directory inside a mounted folder, not the mounted folder itself"
        ) from None
    sync_one(directory.parent)
    # Last: without its state, a folder that a kill leaves unrenamed would be fetched anew.
    (directory / STATE).unlink(missing_ok=True)


class _Meter:
    """Turns bytes of files into progress: of all together, and with `bars` of each large one."""

    def __init__(self, selection: Selection, on_progress: OnProgress, *, bars: bool) -> None:
        self._total = selection.size
        self._on_progress = on_progress
        self._bars = bars
        self._lock = threading.Lock()
        self._of_file: dict[str, int] = {}
        self._shown_at = 0.0

    def advance(self, file: RemoteFile, count: int) -> None:
        """So many more bytes of a file are there."""
        with self._lock:
            have = self._of_file[file.name] = self._of_file.get(file.name, 0) + count
            now = time.monotonic()
            if now - self._shown_at < 0.1 and have < file.size:
                return
            self._shown_at = now
            if self._bars and file.size >= _BAR_FROM:
                self._on_progress(Progress(file.name, have, file.size, "bytes"))
            self._on_progress(Progress("fetching", sum(self._of_file.values()), self._total, "bytes"))

    def end(self) -> None:
        """Everything is there."""
        self._on_progress(Progress("fetching", self._total, self._total, "bytes"))
