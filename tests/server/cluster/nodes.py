"""Replicas as processes on this machine, without Ray: what their actor does is done here."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.cluster.replica import Address
from tests.server.conftest import alive

LIMIT = 30.0  # seconds: a bound on a hang


@dataclass
class Node:
    """A replica's process and what it has said."""

    process: asyncio.subprocess.Process
    name: str
    said: list[dict[str, Any]] = field(default_factory=list)

    @property
    def address(self) -> Address:
        """Where it listens."""
        port = next(one for one in self.said if "port" in one)
        return Address(self.name, "m", "127.0.0.1", port["port"], port["secret"])

    @property
    def states(self) -> list[str]:
        """Its states so far, each once."""
        return list(dict.fromkeys(one["state"] for one in self.said if "state" in one))

    async def read(self) -> None:
        """Keeps what it says."""
        assert self.process.stdout is not None
        while text := await self.process.stdout.readline():
            self.said.append(json.loads(text))


async def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    deadline = asyncio.get_running_loop().time() + LIMIT
    while asyncio.get_running_loop().time() < deadline:
        if value := condition():
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"not seen within {LIMIT:g} s: {what}")


@contextlib.asynccontextmanager
async def node(model: Path, name: str = "one", **arguments: Any) -> AsyncIterator[Node]:
    """A started replica with the fake engine; killed at the end if it still runs. Fails if its engine lives on."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server.cluster.node", "127.0.0.1"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    flags = {"model": str(model), "served-model-name": ["m"], "preset": "cpu-smoke"}
    given = {"name": "m", "flags": flags, "env": {}, "drain": 10, "nodes": 1, "ports": None}
    given["module"] = "tests.fakes.engine"
    assert process.stdin is not None
    process.stdin.write(json.dumps({**given, **arguments}).encode() + b"\n")
    made = Node(process, name)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        engines = children(process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading
        await until(lambda: not any(map(alive, engines)), "the engine has ended too")


def children(pid: int) -> list[int]:
    """The processes that a process has started; none of one that has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
