"""Model directories for the fake engine, and whole servers on an ephemeral loopback port."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.quant.checkpoints import write_model
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 30.0  # seconds after which a test gives up: a bound on a hang, not a check of speed


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    return wait_until(condition, LIMIT, what, every_s=0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def make_model(folder: Path, **fake: object) -> Path:
    """A model directory that passes the preflight; `fake` is how the fake engine starts."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder)
    (folder / "fake.json").write_text(json.dumps(fake))
    return folder


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path leaves room for a Unix socket's, which pytest's does not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@dataclass
class Served:
    """A running server process."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path
    model: Path

    def health(self) -> tuple[int, dict[str, Any]]:
        response = httpx.get(f"{self.url}/health")
        return response.status_code, response.json()

    def wait_for_state(self, *states: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            body = self.health()[1]
            return body if body["state"] in states else None

        body: dict[str, Any] = wait_for(reached, f"state {states}; log:\n{self.log.read_text()[-3000:]}")
        return body

    def engine_pids(self) -> list[int]:
        """The engine's processes, which descend from the server's."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": str(self.model), "prompt": "Hi", **body}, timeout=LIMIT)

    def stats(self) -> dict[str, Any]:
        """The fake engine's own counters, over its socket."""
        sockets = [Path(word) for word in self.engine_argv() if word.endswith("engine.sock")]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(sockets[0]))) as client:
            stats: dict[str, Any] = client.get("http://engine/stats").json()
            return stats

    def engine_argv(self) -> list[str]:
        return Path(f"/proc/{self.engine_pids()[0]}/cmdline").read_text().split("\0")

    def wait_for_exit(self) -> int:
        return self.process.wait(LIMIT)


@contextlib.contextmanager
def serving(model: Path, *flags: str, env: dict[str, str] | None = None, with_model: bool = True) -> Iterator[Served]:
    """A server process with the fake engine. Fails if it leaves any engine process behind."""
    log = model.parent / f"{model.name}.log"
    named = ["--model", str(model)] if with_model else []
    command = [sys.executable, "-m", "tests.fakes.serve", *named, "--port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VOLTSERVE_")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env={**environment, **(env or {})})
    engines: list[int] = []
    try:
        port = wait_for(lambda: _port(log, process), "listening")
        served = Served(process, f"http://127.0.0.1:{port}", log, model)
        yield served
        if process.poll() is None:
            engines = served.engine_pids()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not stop; log:\n{log.read_text()[-3000:]}") from None
    assert not [pid for pid in engines if alive(pid)]


def _port(log: Path, process: "subprocess.Popen[bytes]") -> int | None:
    text = log.read_text()
    assert process.poll() is None, text
    lines = [line for line in text.splitlines() if "listening" in line]
    match = re.search(r"port\W+(\d+)", lines[0]) if lines else None
    return int(match[1]) if match else None
