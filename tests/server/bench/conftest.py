"""The fake engine on a TCP port, without a gateway, and outcomes made by hand."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from server.bench.client import Outcome
from server.bench.load import Closed, Level
from server.bench.prompts import Target
from server.bench.run import LevelResult, Warmup
from tests.fakes.engine import FakeEngine, Start
from tests.server.conftest import wait_for

MODEL = "fake"


@contextlib.contextmanager
def engine(folder: Path, start: Start) -> Iterator[tuple[Target, FakeEngine]]:
    """A fake engine that serves on a free port until the end."""
    fake = FakeEngine(folder, [MODEL], start)
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(fake.app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        wait_for(lambda: server.started, "the fake engine listens")
        yield Target(f"http://127.0.0.1:{sock.getsockname()[1]}", MODEL), fake
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with engine(tmp_path, Start()) as (found, _):
        yield found


def outcome(sent: float, first: float, gap: float, tokens: int, due: float | None = None) -> Outcome:
    """One request whose `tokens` arrive `gap` seconds apart, the first at `first`; times since the level's start."""
    events = tuple(first + gap * number for number in range(tokens))
    return Outcome(sent if due is None else due, sent, events, events[-1], 8, tokens)


def level(outcomes: list[Outcome], seconds: float, load: Level | None = None) -> LevelResult:
    return LevelResult(load or Closed(4), Warmup(4, 0, 0.5), seconds, tuple(outcomes), 0.1, 0.2)
