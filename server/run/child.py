"""`voltserve serve` as a child process, for commands that start and stop one themselves (sweep, smoke)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx

from quant.progress import OnProgress, Progress, ignore_progress
from server.errors import UserError
from server.run.lifetime import EXIT_BY_SIGNAL

POLL = 0.2  # seconds between two looks
STOP_LIMIT = 60.0  # seconds after SIGTERM; serve's own drain and stop timeouts end well before
END_LIMIT = 5.0  # seconds between serve's last answer and its end, where it ends by itself
LAST_WORDS = "engine's last words"  # the supervisor's event with a line of the engine's
LAST_LINES = 20  # of the log, in the error of a service that ended by itself


class ServiceFailedError(UserError):
    """The service did not become ready. `diagnosis` is the error catalogue's, where it knows."""

    exit_code = 1

    def __init__(self, reason: str, diagnosis: Mapping[str, Any] | None = None) -> None:
        about = f": {diagnosis['title']}. {' '.join(diagnosis['remedy'])}" if diagnosis else ""
        super().__init__(f"{reason}{about}")
        self.reason = reason
        self.diagnosis = diagnosis


@dataclass(frozen=True)
class Service:
    """A running `serve`; `log` has its lines, one JSON object each."""

    process: "subprocess.Popen[bytes]" = field(repr=False)
    url: str
    log: Path

    def health(self) -> dict[str, Any]:
        """The body of `/health`.

        Raises:
            ServiceFailedError: it does not answer.
        """
        try:
            body = httpx.get(f"{self.url}/health", timeout=10).json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServiceFailedError(f"/health does not answer: {error or type(error).__name__}") from error
        return body if isinstance(body, dict) else {}

    def wait_until_ready(self, what: str = "starting", on_progress: OnProgress = ignore_progress) -> float:
        """Waits for a first completion that worked. Returns the seconds since this call.

        Raises:
            ServiceFailedError: the engine failed once, or serve ended. Its restarts are not waited for.
        """
        began = time.monotonic()
        while True:
            _check_alive(self.process, self.log)
            body = self._health_or_end()
            if body["state"] == "ready":
                return time.monotonic() - began
            if body["state"] == "failed":
                raise ServiceFailedError(body["last_exit"] or body["reason"], body["diagnosis"])
            phase = (body["progress"] or {}).get("phase") or body["state"]
            on_progress(Progress(what, 0, 1, "start", f"{phase}, {time.monotonic() - began:.0f} s"))
            time.sleep(POLL)

    def _health_or_end(self) -> dict[str, Any]:
        """The body of `/health`. Where serve has just ended, raises the reason."""
        try:
            return self.health()
        except ServiceFailedError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT)
            _check_alive(self.process, self.log)
            raise

    def stop(self) -> int:
        """Ends it in order and returns its exit code; kills it where that takes longer than a minute."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its engine dies with it
            return self.process.wait()


@contextlib.contextmanager
def running(
    flags: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, module: str = "server"
) -> Iterator[Service]:
    """Starts `serve` with these flags on a free loopback port; stops it at the end, also at SIGTERM or SIGHUP.

    Args:
        flags: as for `voltserve serve`, without --port.
        log: where its output goes.
        environ: variables beside those of this process.
        module: the Python module that is `serve`.

    Raises:
        ServiceFailedError: it ended before it listened, as it does for flags and models it refuses.
    """
    with _ended_by_signals():
        yield from _running(flags, log, environ or {}, module)


def _running(flags: Sequence[str], log: Path, environ: Mapping[str, str], module: str) -> Iterator[Service]:
    command = [sys.executable, "-m", module, *flags, "--host", "127.0.0.1", "--port", "0", "--log-format", "json"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environ},
            start_new_session=True,  # Ctrl-C is for us, who then stop it in order
        )
    service = None
    try:
        while (port := _port(log)) is None:
            _check_alive(process, log)
            time.sleep(POLL)
        service = Service(process, f"http://127.0.0.1:{port}", log)
        yield service
    finally:
        (service or Service(process, "", log)).stop()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into exceptions, as SIGINT is, so that children are stopped before this process ends.
    SIGHUP stays ignored under nohup.
    """

    def end(number: int, _: object) -> NoReturn:
        sys.exit(EXIT_BY_SIGNAL + number)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_alive(process: "subprocess.Popen[bytes]", log: Path) -> None:
    code = process.poll()
    if code is None:
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    records = [_record(line) for line in lines]
    diagnoses = [record for record in records if record.get("event") == "diagnosis"]
    if diagnoses:
        words = "; ".join(str(record["line"]) for record in records if record.get("event") == LAST_WORDS)
        docs = str(diagnoses[-1]["see"])
        found = {
            "id": docs.partition("#")[2],
            "title": diagnoses[-1]["what"],
            "remedy": [diagnoses[-1]["remedy"]],
            "docs": docs,
        }
        raise ServiceFailedError(f"serve ended with exit code {code}: {words}", found)
    last = "\n".join(map(_event, lines[-LAST_LINES:]))
    raise ServiceFailedError(f"serve ended with exit code {code}: {last}")


def _port(log: Path) -> int | None:
    """The port of the line that says `listening`."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _record(line)
        if record.get("event") == "listening":
            return int(record["port"])
    return None


def _event(line: str) -> str:
    """A log line for people. A refusal by serve is no JSON and stays unchanged."""
    record = _record(line)
    return str(record["event"]) if "event" in record else line.removeprefix("voltserve: ")


def _record(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
