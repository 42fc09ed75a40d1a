import asyncio
import os
import sys
from pathlib import Path

import pytest

from server.config.render import Launch
from server.supervisor.process import EngineProcess, describe_exit, running

LEAVES_A_CHILD = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid)"
)


class Lines(list[str]):
    """The engine's lines, and whether there is any."""

    def __init__(self) -> None:
        self.any = asyncio.Event()

    def take(self, _: str, line: str) -> None:
        self.append(line)
        self.any.set()


async def start(code: str) -> tuple[EngineProcess, Lines]:
    lines = Lines()
    launch = Launch((sys.executable, "-u", "-c", code), {"PATH": os.environ["PATH"]})
    return await EngineProcess.start(launch, lines.take), lines


async def test_a_process_that_heeds_sigterm_is_stopped_by_it() -> None:
    process, lines = await start("print('up'); import time; time.sleep(600)")
    await lines.any.wait()
    await process.stop(limit=30)
    assert await process.wait() == -15


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    process, lines = await start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    )
    await lines.any.wait()
    await process.stop(limit=0.2)
    assert await process.wait() == -9


async def test_what_a_dead_engine_left_behind_is_stopped_too() -> None:
    process, lines = await start(LEAVES_A_CHILD)
    await lines.any.wait()
    assert await process.wait() == 0
    assert running(process.group) == [int(lines[0])]
    await process.stop(limit=30)
    assert running(process.group) == []


async def test_the_output_is_complete_after_the_stop() -> None:
    process, lines = await start("for i in range(5000): print('line', i)")
    await process.wait()
    await process.stop(limit=5)
    assert lines[-1] == "line 4999"
    assert len(lines) == 5000


async def test_an_engine_that_cannot_be_started_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        await EngineProcess.start(Launch((str(tmp_path / "none"),), {}), lambda *_: None)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-15, "was killed by SIGTERM"),
        (-77, "was killed by signal 77"),
    ],
)
def test_an_exit_code_is_put_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_a_sigkill_hints_at_memory() -> None:
    assert "memory" in describe_exit(-9)
