"""One engine process and everything it starts: a process group of its own. No process of it is left behind."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from server.config.render import Launch
from server.environment import SUPERVISOR
from server.supervisor.output import EngineOutput

_POLL = 0.05  # seconds
_KILL_LIMIT = 5.0  # seconds in which the kernel removes a killed group; longer means a process stuck in a driver


class EngineProcess:
    """A started engine. Make one with `EngineProcess.start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: EngineOutput,
        pump: "asyncio.Task[None]",
        pipe: asyncio.BaseTransport,
    ) -> None:
        self._process = process
        self.output = output
        self._pump = pump
        self._pipe = pipe

    @classmethod
    async def start(cls, launch: Launch, on_line: Callable[[str, str], None]) -> "EngineProcess":
        """Starts the engine in a new session, so that a signal reaches all of it and Ctrl-C on a terminal none of it.

        stdout and stderr share one pipe, which keeps their order. The pipe is ours, not asyncio's: asyncio's `wait`
        lasts until every process with its pipes has ended, so orphans would hide the engine's death.

        Raises:
            OSError: the interpreter cannot be started.
        """
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env={**launch.env, SUPERVISOR: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        stream = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", 0)
        )
        output = EngineOutput(on_line)
        return cls(process, output, asyncio.create_task(output.pump(stream)), pipe)

    @property
    def group(self) -> int:
        """The process group; its leader is the engine's first process."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit code of the first process; negative for a signal."""
        return await self._process.wait()

    async def stop(self, limit: float) -> None:
        """SIGTERM, then SIGKILL after `limit` seconds, to the whole group; returns when none of it runs.

        Also called when the first process has ended by itself: it may have left others.
        """
        self._signal(signal.SIGTERM)
        if not await self._gone_within(limit):
            self._signal(signal.SIGKILL)
            await self._gone_within(_KILL_LIMIT)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._pump, _KILL_LIMIT)
        self._pipe.close()

    def kill(self) -> None:
        """SIGKILL to the whole group, without waiting."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)

    async def _gone_within(self, limit: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit
        while running(self.group):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL)
        await self._process.wait()
        return True


def running(group: int) -> list[int]:
    """Processes of a group that still run; zombies, which only wait to be collected, do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # proc(5): pid (comm) state ppid pgrp …; comm may hold blanks and parentheses.
            state, _, group_text = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it ended while we looked
            continue
        if int(group_text) == group and state not in {"Z", "X"}:
            members.append(int(stat.parent.name))
    return members


def describe_exit(code: int) -> str:
    """Describes an exit code."""
    if code >= 0:
        return f"exited with code {code}"
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = " (the kernel does this when memory runs out)" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
