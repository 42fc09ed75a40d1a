"""What a process that serves needs from its start to its end: signals, a private folder, enough open files."""

import asyncio
import contextlib
import resource
import shutil
import signal
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from server.errors import PreflightError

# A Unix socket's path must fit sockaddr_un.sun_path, 108 bytes with its final zero (unix(7)).
MAX_SOCKET_PATH = 107
BACKLOG = 2048  # connections that wait to be accepted; uvicorn's own default
EXIT_BY_SIGNAL = 128  # plus the signal's number, as shells have it


class Signals:
    """SIGTERM and SIGINT: the first asks for an orderly end, the second for an immediate one."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.name = ""
        self.exit_code = 0
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        if not self.first.is_set():
            self.name = number.name
            self.first.set()
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
    """A private folder (mode 0700) for the engine's sockets, removed at the end.

    Raises:
        PreflightError: it cannot be made, or its path is too long for a Unix socket.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="voltserve-"))
    except OSError as error:
        raise PreflightError(f"no folder for the engine's sockets: {error.strerror}; set TMPDIR") from error
    try:
        if len(bytes(folder / str(uuid.uuid4()))) > MAX_SOCKET_PATH:  # vLLM's names, longer than ours
            raise PreflightError(f"{folder} is too long for a Unix socket's path ({MAX_SOCKET_PATH} bytes); set TMPDIR")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def allow_many_files() -> None:
    """Raises the soft limit of open files to the hard one: each stream needs two, and 1024 is a common soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
