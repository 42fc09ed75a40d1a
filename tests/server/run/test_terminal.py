import io
import shlex
import subprocess
import time

import pytest
from rich.console import Console

from quant.progress import Progress as WorkProgress
from server import logs
from server.config.devices import Devices
from server.config.settings import Config, load_config
from server.run.terminal import LiveReporter, LoggedWork, LogReporter, WorkBar, printable_url, ready_lines
from server.supervisor import Progress, State, Status

URL = "http://127.0.0.1:8000"


@pytest.fixture
def config() -> Config:
    return load_config(["--model", "models/it's 中文"], {}, lambda: Devices((), "none"))


def status(state: State, progress: Progress | None = None) -> Status:
    now = time.monotonic()
    return Status(state, "for a test", since=now, started_at=now, progress=progress)


START = [
    status(State.STARTING),
    status(State.LOADING, Progress("weights", 5, 10, "bytes")),
    status(State.LOADING, Progress("weights", 10, 10, "bytes")),
    status(State.WARMING, Progress("first completion")),
    status(State.READY),
]


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", URL), ("0.0.0.0", URL), ("::", "http://[::1]:8000"), ("localhost", "http://localhost:8000")],  # noqa: S104
)
def test_the_url_shown_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert printable_url(host, 8000) == url


def test_the_curl_line_survives_a_shell(config: Config) -> None:
    command = ready_lines(config, URL)[1].removeprefix("try: ")
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words == shlex.split(command)
    assert "models/it's 中文" in words[-1]


def test_the_curl_line_has_a_key_where_keys_are_needed(config: Config) -> None:
    assert "Authorization" not in ready_lines(config, URL)[1]
    words = shlex.split(ready_lines(config.model_copy(update={"keys_file": "keys.json"}), URL)[1])
    assert "Authorization: Bearer YOUR_KEY" in words


def test_a_terminal_that_has_closed_stops_nothing(config: Config) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    show = LiveReporter(config, URL, Console(file=Closed(), force_terminal=True, width=100))
    for one in START:
        show.show(one)
        show.write("a log line")
    show.close()


def test_a_pipe_gets_a_line_for_each_phase_and_the_ready_lines_once(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    show = LogReporter(config, URL)
    logs.configure("info", "text", show.write)
    for one in [*START, status(State.DEGRADED), status(State.READY)]:
        show.show(one)
    captured = capsys.readouterr()
    assert captured.err.count("phase=weights") == 1
    assert "done=5" in captured.err
    assert captured.err.count("first completion") == 1
    assert captured.err.count("ready: ") == 1


def test_a_terminal_gets_a_bar_with_bytes_above_which_the_log_goes_on(config: Config) -> None:
    out = io.StringIO()
    show = LiveReporter(config, URL, Console(file=out, force_terminal=True, width=100))
    for one in START[:3]:
        show.show(one)
        show.write("a log line")
    for one in START[3:]:
        show.show(one)
    text = out.getvalue()
    assert "weights" in text
    assert "10/10 bytes" in text
    assert text.count("a log line") == 3
    assert f"ready: {URL}/v1" in text


def test_a_failure_takes_the_bar_down(config: Config) -> None:
    show = LiveReporter(config, URL, Console(file=io.StringIO(), force_terminal=True))
    show.show(START[1])
    show.show(status(State.FAILED))
    assert show._task is None


def test_work_is_logged_once_a_step_without_a_terminal() -> None:
    lines: list[str] = []
    logs.configure("info", "text", lines.append)
    with LoggedWork() as on_progress:
        for what in ("reading", "quantizing"):
            for done in range(100):
                on_progress(WorkProgress(what, done, 100, "bytes"))
    assert ["reading" in line for line in lines] == [True, False]


def test_work_is_a_bar_a_step_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with WorkBar() as on_progress:
        on_progress(WorkProgress("quantizing", 3_000_000, 6_000_000, "bytes"))
        on_progress(WorkProgress("converting", 1, 2, "models"))
    text = capsys.readouterr().err
    assert "3/6 MB" in text
    assert "1/2 models" in text
