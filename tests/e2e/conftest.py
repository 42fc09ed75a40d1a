"""The service as a user starts it: `voltserve serve` on the quantized SmolLM2, the real engine, on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
MODEL = "models/smollm2-nvfp4"
START_LIMIT_S = 300  # a bound on a hang, not a check of speed


@dataclass
class Service:
    """A running `voltserve serve`, its address and every distinct /health body seen while it started."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    seen: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    cold_start_s: float = 0.0

    def health(self) -> tuple[int, dict[str, Any]] | None:
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.get(f"{self.url}/health", timeout=5)
            return reply.status_code, reply.json()
        return None

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, (
                f"voltserve exited {self.process.returncode}:\n{self.log.read_text()[-4000:]}"
            )
            now = self.health()
            if now is None:
                return False
            if not self.seen or self.seen[-1] != now:
                self.seen.append(now)
            return now[0] == 200

        wait_until(ready, limit_s, "ready")

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def metric(self, name: str) -> float:
        """The sum over the samples of one metric in /metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=5).text.splitlines()
        values = [float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith((f"{name}{{", f"{name} "))]
        assert values, f"{name} is not in /metrics"
        return sum(values)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(log: Path, *flags: str, model: str = MODEL, **environment: str) -> Iterator[Service]:
    port = free_port()
    named = ["--model", model] if model else []
    command = [str(Path(sys.executable).with_name("voltserve")), "serve", *named, "--port", str(port), *flags]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    service = Service(process, f"http://127.0.0.1:{port}", log)
    try:
        service.wait_ready()
        service.cold_start_s = time.monotonic() - began
        yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                pytest.fail("voltserve did not stop within 60 s of SIGTERM")


# One start for all: files up to test_isolation.py leave it as it was; test_main_job.py, the next, ends it.
@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    assert (ROOT / MODEL / "config.json").exists(), f"{MODEL} is missing: make {MODEL}"
    with serving(tmp_path_factory.mktemp("serve") / "log") as started:
        yield started
