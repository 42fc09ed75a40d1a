"""Shows a person at the terminal how the engine loads, and when it is ready."""

import contextlib
import json
import shlex
import time

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from quant.progress import OnProgress
from quant.progress import Progress as WorkProgress
from server import logs
from server.config.settings import Config
from server.supervisor import State, Status

LOG_INTERVAL = 10.0  # seconds between two log lines about the same phase

log = structlog.get_logger("voltserve.serve")

_STARTING = {State.STARTING, State.LOADING, State.WARMING}


def ready_lines(config: Config, url: str) -> list[str]:
    """The URL, the model's name, and a request to try."""
    return [f"ready: {url}/v1 serves {', '.join(config.served_model_name)}", f"try: {trial(config, url)}"]


def trial(config: Config, url: str) -> str:
    """A command that asks the model."""
    model = config.served_model_name[0]
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]},
        ensure_ascii=False,
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.keys_file else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def printable_url(host: str, port: int) -> str:
    """Where a client on this machine finds the gateway; a wildcard address becomes the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 — recognised, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class LogReporter:
    """For pipes and containers: a log line at each phase and every ten seconds within one."""

    def __init__(self, config: Config, url: str) -> None:
        self._config = config
        self._url = url
        self._phase = ""
        self._logged_at = 0.0
        self._state: State | None = None
        self._told = False

    def write(self, line: str) -> None:
        """Takes a finished log line."""
        logs.write_stderr(line)

    def show(self, status: Status) -> None:
        """Takes the supervisor's new status."""
        if status.state is State.READY and self._state is State.WARMING:
            self._report_ready()
        self._state = status.state
        if status.progress is None or status.state not in _STARTING:
            return
        now = time.monotonic()
        if status.progress.phase == self._phase and now - self._logged_at < LOG_INTERVAL:
            return
        self._phase, self._logged_at = status.progress.phase, now
        progress = {"done": status.progress.done, "total": status.progress.total, "unit": status.progress.unit}
        known = {name: value for name, value in progress.items() if value is not None}
        log.info("loading", phase=self._phase, elapsed=round(status.start_elapsed, 1), **known)

    def _report_ready(self) -> None:
        if self._told and self._config.demand is not None:  # it becomes ready again and again
            return
        self._told = True
        if self._config.log_format == "json":
            log.info("ready", url=f"{self._url}/v1", models=self._config.served_model_name)
            log.info("try", command=trial(self._config, self._url))
            return
        for line in ready_lines(self._config, self._url):
            self.write(line)

    def close(self) -> None:
        """Nothing to take down."""


class LiveReporter:
    """For a terminal: one live line with phase, bar, bytes and time, below the log."""

    def __init__(self, config: Config, url: str, console: Console) -> None:
        self._config = config
        self._url = url
        self._console = console
        self._state: State | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def write(self, line: str) -> None:
        """Takes a finished log line, and puts it above the live one."""
        with contextlib.suppress(OSError):  # a terminal that has closed stops nothing
            self._console.out(line, highlight=False)

    def show(self, status: Status) -> None:
        """Takes the supervisor's new status."""
        with contextlib.suppress(OSError):
            self._show(status)

    def _show(self, status: Status) -> None:
        if status.state is State.READY and self._state is State.WARMING:
            self.close()
            for line in ready_lines(self._config, self._url):
                self._console.out(line, style="bold green", highlight=False)
        self._state = status.state
        if status.state not in _STARTING:
            self.close()
            return
        if self._task is None:
            self._task = self._bar.add_task(status.state.value, total=None)
            self._bar.start()
        progress = status.progress
        self._bar.update(
            self._task,
            description=progress.phase if progress else status.state.value,
            completed=(progress.done if progress else None) or 0,
            total=progress.total if progress else None,
            refresh=True,
        )

    def close(self) -> None:
        """Takes the live line down."""
        if self._task is not None:
            task, self._task = self._task, None
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar.remove_task(task)


Reporter = LogReporter | LiveReporter


def reporter(config: Config, url: str) -> Reporter:
    """The reporter that suits stderr. Several engines cannot share a live line, so each logs. A JSON log has no live
    line.
    """
    console = Console(stderr=True)
    if config.name or config.log_format == "json":
        return LogReporter(config, url)
    return LiveReporter(config, url, console) if console.is_terminal else LogReporter(config, url)


class LoggedWork:
    """Progress of a command's work for pipes: a log line at each step and every ten seconds within one."""

    def __init__(self) -> None:
        self._what = ""
        self._logged_at = 0.0

    def __enter__(self) -> OnProgress:
        return self._show

    def __exit__(self, *_: object) -> None:
        """Nothing to take down."""

    def _show(self, progress: WorkProgress) -> None:
        now = time.monotonic()
        if progress.what == self._what and now - self._logged_at < LOG_INTERVAL:
            return
        self._what, self._logged_at = progress.what, now
        note = {"note": progress.note} if progress.note else {}
        log.info(progress.what, done=progress.done, total=progress.total, unit=progress.unit, **note)


class WorkBar:
    """Progress of a command's work on a terminal: a bar for each step."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> OnProgress:
        self._bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _show(self, progress: WorkProgress) -> None:
        amount = f"{progress.done}/{progress.total} {progress.unit}"
        if progress.unit == "bytes":
            amount = f"{progress.done / 1e6:.0f}/{progress.total / 1e6:.0f} MB"
        if progress.note:
            amount += f", {progress.note}"
        if progress.what not in self._tasks:
            self._tasks[progress.what] = self._bar.add_task(progress.what, amount=amount)
        task = self._tasks[progress.what]
        self._bar.update(task, completed=progress.done, total=progress.total, amount=amount)
