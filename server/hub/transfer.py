"""One file from a hub to the disk: resumed where it was cut, checked against its size and digest, then named.

The bytes collect in `NAME.part`. It becomes `NAME` once they are what the hub's list says, and are on the disk. A kill
at any moment leaves a `.part` that the next run goes on from.
"""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import httpx

from quant.atomic import sync_one
from server.errors import HubError
from server.hub.http import PassingError, Patience, asked
from server.hub.listing import RemoteFile
from server.hub.source import Source

PART = ".part"
_CHUNK = 1 << 20
_PROGRESS = 1 << 16  # bytes of a try that make it count as progress
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoppedError(Exception):
    """Another file failed, or the user stopped the run; what has arrived is kept."""


class WrongBytesError(Exception):
    """What arrived is not the file that the hub's list describes."""


class Digests:
    """The digests of a file's bytes, in order: SHA-256, and Git's id where that is what the hub knows."""

    def __init__(self, file: RemoteFile) -> None:
        self._sha256 = hashlib.sha256()
        # Git's own name for the content; no protection by itself, as SHA-1 never is.
        self._git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False) if file.git_sha1 else None

    def update(self, data: bytes) -> None:
        """Adds the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """The SHA-256 so far."""
        return self._sha256.hexdigest()

    def check(self, file: RemoteFile) -> None:
        """Raises WrongBytesError where a digest is not the list's."""
        if file.sha256 and self.sha256 != file.sha256.lower():
            raise WrongBytesError(f"expected sha256 {file.sha256[:64]}, got {self.sha256}")
        if self._git is not None and self._git.hexdigest() != file.git_sha1.lower():
            raise WrongBytesError(f"expected Git's id {file.git_sha1[:64]}, got {self._git.hexdigest()}")


@dataclass
class Transfer:
    """Fetches the files of one source into one folder. `on_bytes(file, n)`: n more are there, or fewer if negative."""

    client: httpx.Client
    source: Source
    folder: Path
    on_bytes: Callable[[RemoteFile, int], None]
    stop: threading.Event = field(default_factory=threading.Event)

    def fetch(self, file: RemoteFile) -> str:
        """Fetches `file`, and returns its SHA-256.

        Raises HubError: refused, not the file of the list twice, disk full. Raises StoppedError.
        """
        part = self.folder / f"{file.name}{PART}"
        for last in (False, True):
            try:
                digest = self._complete(file, part)
                sync_one(part)
                part.rename(self.folder / file.name)
            except WrongBytesError as error:
                self._forget(file, part)
                if last:
                    what = f"{self.source}: {file.name}: {error}, twice"
                    raise HubError(f"{what}; the copy there is damaged or another: try another --endpoint") from None
            except OSError as error:
                raise self._disk(error, file) from None
            else:
                return digest
        raise AssertionError("unreachable: the second try returns or raises")

    def _complete(self, file: RemoteFile, part: Path) -> str:
        """Makes `part` whole. Raises WrongBytesError."""
        patience = Patience(f"{self.source}: {file.name}", self.stop)
        with _opened(part) as output:
            digests, have = self._begun(file, output)
            while have < file.size:
                before = have
                try:
                    have = self._go_on(file, output, digests, have)
                except PassingError as error:
                    output.seek(0, os.SEEK_END)
                    have = output.tell()
                    if have - before >= _PROGRESS:
                        patience.progress()
                    patience.wait(error)
                if self.stop.is_set():
                    raise StoppedError
                if not have:
                    digests = Digests(file)  # the server sends the file from its start, whatever is asked
        digests.check(file)
        return digests.sha256

    def _begun(self, file: RemoteFile, output: BinaryIO) -> tuple[Digests, int]:
        """The digests of what an earlier run left, and how much that is."""
        digests, have = Digests(file), 0
        while chunk := output.read(_CHUNK):
            digests.update(chunk)
            have += len(chunk)
        if have > file.size:
            raise WrongBytesError(f"expected {file.size} bytes, got {have}")
        return digests, have

    def _go_on(self, file: RemoteFile, output: BinaryIO, digests: Digests, have: int) -> int:
        """Requests the missing bytes, and writes them as they arrive. 0: begin anew.

        Raises PassingError or WrongBytesError.
        """
        headers = {"Range": f"bytes={have}-"} if have else {}
        with asked(self.client, self.source, file.url, headers) as response:
            if have and response.status_code != 206:
                self.on_bytes(file, -have)
                output.seek(0)
                output.truncate()
                return 0
            _check_answer(response, file, have)
            for chunk in response.iter_raw():  # as they arrive: a broken connection would lose larger pieces
                if self.stop.is_set():
                    raise StoppedError
                if have + len(chunk) > file.size:
                    raise WrongBytesError(f"expected {file.size} bytes, got more")
                _write(output, chunk)
                digests.update(chunk)
                have += len(chunk)
                self.on_bytes(file, len(chunk))
        if have < file.size:
            raise PassingError(f"the answer ended after {have} of {file.size} bytes")
        return have

    def _forget(self, file: RemoteFile, part: Path) -> None:
        self.on_bytes(file, -min(part.stat().st_size, file.size))
        part.unlink()

    def _disk(self, error: OSError, file: RemoteFile) -> HubError:
        if error.errno in _FULL:
            return HubError(
                f"{self.folder}: the disk is full, {file.name} is not whole; "
                "make room and give the same command again, which goes on from what has arrived"
            )
        return HubError(f"{self.folder / file.name}: cannot be written: {error.strerror or error}")


def _opened(part: Path) -> BinaryIO:
    """Opens a `.part` for reading and appending. What another has put there, such as a link, is refused (OSError)."""
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    # Unbuffered: what was written counts as arrived even if the process dies now.
    return os.fdopen(descriptor, "r+b", buffering=0)


def _write(output: BinaryIO, data: bytes) -> None:
    """Writes all of `data`, of which an unbuffered file may take a part at a time."""
    left = memoryview(data)
    while left:
        left = left[output.write(left) :]


def _check_answer(response: httpx.Response, file: RemoteFile, have: int) -> None:
    """Raises WrongBytesError where an answer is not the rest of the file that the list describes."""
    length = response.headers.get("content-length", "")
    total = str(have + int(length)) if length.isdecimal() and len(length) < 19 else ""
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if not match or int(match[1]) != have:
            got = response.headers.get("content-range", "none")[:80]
            raise WrongBytesError(f"expected the bytes from {have}, got Content-Range {got!r}")
        total = match[3]
    elif response.status_code != 200:
        raise WrongBytesError(f"expected {file.size} bytes, got status {response.status_code}")
    if total not in ("", "*", str(file.size)):
        kind = response.headers.get("content-type", "").partition(";")[0]
        page = ", a web page" if kind == "text/html" else ""
        raise WrongBytesError(f"expected {file.size} bytes by the list, got {total}{page}")
    etag = response.headers.get("etag", "")
    if file.etag and etag and etag != file.etag:
        raise WrongBytesError(f"expected version {file.etag[:80]}, got {etag[:80]}: it changed meanwhile")
