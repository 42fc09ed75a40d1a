"""The engine as the gateway starts it, for the trials beside this file: HTTP over its socket, and its decisions."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.environment import PROGRESS_SOCKET

START_LIMIT = 300.0  # seconds


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=600)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(600)
        self.sock.connect(self._path)


class Decisions:
    """An engine's decisions, collected from its datagrams until the socket is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.decisions: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, args=(sock,), daemon=True).start()

    def _listen(self, sock: socket.socket) -> None:
        while True:
            try:
                message = json.loads(sock.recv(8192))
            except OSError:
                return
            if message.get("event") == "decision":
                self.decisions.append({key: message[key] for key in ("what", "choice", "reason")})


def listen_for_decisions() -> Decisions:
    """Those of an engine started by this very process from now on."""
    path = f"{tempfile.mkdtemp()}/progress.sock"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(path)
    os.environ[PROGRESS_SOCKET] = path
    return Decisions(sock)


class Engine:
    """A running engine; `decisions` and `start_seconds` say how it started."""

    def __init__(self, path: str, decisions: list[dict[str, Any]]) -> None:
        self._path = path
        self.decisions = decisions
        self.start_seconds = 0.0

    def post(self, route: str, body: dict[str, Any]) -> Any:
        """The answer's JSON. Raises RuntimeError for a status other than 200."""
        connection = _Connection(self._path)
        connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{route}: expected 200, got {answer.status}: {text[:500]!r}")
        return json.loads(text)

    def healthy(self) -> bool:
        """Whether /health answers 200."""
        try:
            connection = _Connection(self._path)
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except OSError:
            return False
        return status == 200


@contextmanager
def serve(model: Path, flags: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[Engine]:
    """Starts `python -m engine`, waits until it is healthy, stops it at the end.

    Raises RuntimeError with the log's end where it does not come up.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        path = f"{folder}/engine.sock"
        events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        events.bind(f"{folder}/progress.sock")
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            PROGRESS_SOCKET: f"{folder}/progress.sock",
            **(environment or {}),
        }
        command = [
            sys.executable,
            "-m",
            "engine",
            "--model",
            str(model),
            "--served-model-name",
            "m",
            "--uds",
            path,
            *flags,
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        engine = Engine(path, Decisions(events).decisions)
        try:
            while not engine.healthy():
                if process.poll() is not None or time.monotonic() - began > START_LIMIT:
                    end = "\n".join(log.read_text().splitlines()[-40:])
                    raise RuntimeError(f"the engine did not come up (exit code {process.poll()}):\n{end}")
                time.sleep(0.25)
            engine.start_seconds = round(time.monotonic() - began, 1)
            yield engine
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            events.close()
