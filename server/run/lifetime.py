"""Needs of every process that serves: signals, a private folder, enough open files."""

import asyncio
import contextlib
import fcntl
import os
import resource
import shutil
import signal
import stat
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from server.errors import PreflightError

# A Unix socket's path must fit sockaddr_un.sun_path, 108 bytes with its final zero (unix(7)).
MAX_SOCKET_PATH = 107
BACKLOG = 2048  # connections that wait to be accepted; uvicorn's own default
_PREFIX, _OWNER = "voltserve-", "owner"  # of a runtime folder's name; the file in it that its process keeps locked
EXIT_BY_SIGNAL = 128  # plus the signal's number, as shells have it


class Signals:
    """SIGTERM, SIGINT and SIGHUP: the first asks for an orderly end, a second SIGTERM or SIGINT for an immediate one.

    A terminal that closes sends SIGHUP, often twice. Under nohup, which ignores it, it stays ignored.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.name = ""
        self.exit_code = 0
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        if not self.first.is_set():
            self.name = number.name
            self.first.set()
            return
        if number is signal.SIGHUP:
            return
        self.exit_code = EXIT_BY_SIGNAL + number
        self.second.set()
        self._on_second()


async def first_done(*awaitables: Awaitable[object], limit: float | None = None) -> None:
    """Returns when one of these is done or `limit` seconds have passed; cancels those that were made for this call."""
    tasks = {asyncio.ensure_future(one) for one in awaitables}
    await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks.difference(awaitables):
        task.cancel()


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A private folder (mode 0700) for the engine's sockets, removed at the end. Folders of killed processes are
    removed too.

    Raises:
        PreflightError: it cannot be made, or its path is too long for a Unix socket.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = _owned(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise PreflightError(f"no folder for the engine's sockets: {error.strerror}; set TMPDIR") from error
    try:
        if len(bytes(folder / str(uuid.uuid4()))) > MAX_SOCKET_PATH:  # vLLM's names, longer than ours
            raise PreflightError(f"{folder} is too long for a Unix socket's path ({MAX_SOCKET_PATH} bytes); set TMPDIR")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _owned(folder: Path) -> int:
    """Marks a folder as this process's by a locked file in it. The kernel drops the lock when the process ends.

    The file gets its name after it is locked, so no other process finds it unlocked.
    """
    lock = os.open(folder / f".{_OWNER}", os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / f".{_OWNER}").rename(folder / _OWNER)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Removes this user's runtime folders whose process has ended. Doubtful folders stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()  # a link is no folder
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives, or removes it
                shutil.rmtree(folder)  # follows no link, and not the folder's own name if it became one
            finally:
                os.close(lock)


def allow_many_files() -> None:
    """Raises the soft limit of open files to the hard one: each stream needs two, and 1024 is a common soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
