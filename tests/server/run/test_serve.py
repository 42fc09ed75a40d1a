"""The whole server as a process: health while it loads, faults, drain, exit codes, and nothing left behind."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from server.errors import PreflightError
from server.keys import add_key
from server.supervisor.progress import receive_progress
from tests.server.conftest import LIMIT, ROOT, alive, make_model, serving, wait_for

SLOW = {"tokens": 40, "delay": 0.05}


def test_health_answers_from_the_first_moment_and_tells_the_progress(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m", load_seconds=1.0)) as served:

        def weights() -> dict[str, Any] | None:
            body = served.health()[1]
            return body if body["progress"] and body["progress"]["phase"] == "weights" else None

        body = wait_for(weights, "progress in /health")
        assert served.health()[0] == 503
        assert httpx.get(f"{served.url}/health/live").status_code == 200
        assert httpx.get(f"{served.url}/health/ready").status_code == 503
        assert {key: body["progress"][key] for key in ("done", "total", "unit")} == {
            "done": 400,
            "total": 1000,
            "unit": "bytes",
        }
        refused = served.post()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "weights 40%" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "engine_not_ready"
        assert 'voltserve_state{state="loading"} 1.0' in httpx.get(f"{served.url}/metrics").text
        ready = served.wait_for_state("ready")
        assert served.health()[0] == 200
        assert ready["model"] == str(tmp_path / "m")
        assert {decision["what"] for decision in ready["decisions"]} >= {"preset", "attention"}
        log = served.log.read_text()
        assert f"ready: {served.url}/v1" in log
        assert "curl" in log


def test_version_names_engine_preset_and_model(model: Path) -> None:
    with serving(model, "--served-model-name", "a", "b") as served:
        version = httpx.get(f"{served.url}/version").json()
        assert version["vllm"].startswith("0.28.0")
        assert version["torch"].startswith("2.10.0")
        assert (version["preset"], version["model"]) == ("cpu-smoke", "a")


def test_a_killed_engine_turns_health_to_503_with_the_reason_and_is_restarted(model: Path) -> None:
    with serving(model) as served:
        served.wait_for_state("ready")
        os.kill(served.engine_pids()[0], signal.SIGKILL)
        body = served.wait_for_state("failed")
        assert "SIGKILL" in body["reason"]
        assert served.health()[0] == 503
        refused = served.post()
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert "vllm:" not in httpx.get(f"{served.url}/metrics").text
        ready = served.wait_for_state("ready")
        assert ready["restarts"] == 1
        assert "SIGKILL" in ready["last_exit"]
        assert served.post().status_code == 200


def test_a_stream_that_the_engine_s_death_breaks_ends_with_an_error_event(model: Path) -> None:
    with serving(model) as served:
        served.wait_for_state("ready")
        client = OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
        stream = client.completions.create(
            model=str(model),
            prompt="Hi",
            stream=True,
            extra_body={"fake": {"tokens": 9, "kill_after": 2, "delay": 0.05}},
        )
        texts = []
        with pytest.raises(APIError, match="the engine broke off this request"):
            for chunk in stream:
                texts.append(chunk.choices[0].text)  # noqa: PERF401 — what came before the error counts
        assert texts == ["字0 ", "字1 "]
        wait_for(lambda: "status=502" in served.log.read_text(), "the access log's line")


def test_a_stream_cut_within_an_event_is_a_broken_connection(model: Path) -> None:
    with serving(model) as served:
        served.wait_for_state("ready")
        fake = {"tokens": 9, "kill_after": 2, "half_event": True, "delay": 0.05}
        with pytest.raises(httpx.RemoteProtocolError):
            served.post(stream=True, fake=fake)


def test_an_engine_that_dies_before_the_first_byte_is_a_502(model: Path) -> None:
    with serving(model) as served:
        served.wait_for_state("ready")
        response = served.post(fake={"tokens": 9, "kill_after": 2})
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "engine_unavailable"


def test_sigterm_lets_requests_finish_refuses_new_ones_and_exits_with_0(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", spawn=True)
    with serving(model) as served:
        served.wait_for_state("ready")
        engine = served.engine_pids()[0]
        child = int((model / "child.pid").read_text())
        results: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda stream=stream: results.append(served.post(stream=stream, fake=SLOW)))
            for stream in (True, False, True)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: served.stats()["running"] == 3, "three requests run")
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_state("draining")["reason"] == "SIGTERM came"
        refused = served.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert served.health()[0] == 503
        for thread in threads:
            thread.join(LIMIT)
        assert [response.status_code for response in results] == [200, 200, 200]
        assert all("字39" in response.text for response in results)
        assert served.wait_for_exit() == 0
        assert not alive(engine)
        assert not alive(child)


def test_requests_beyond_the_drain_timeout_are_cut_off_and_not_silently(model: Path) -> None:
    with serving(model, "--drain-timeout", "0.2") as served:
        served.wait_for_state("ready")
        with httpx.stream("POST", f"{served.url}/v1/completions", json=_endless(model), timeout=LIMIT) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGINT)
            with pytest.raises((httpx.RemoteProtocolError, AssertionError)):
                assert "error" not in "".join(lines)
        assert served.wait_for_exit() == 0


def _endless(model: Path) -> dict[str, Any]:
    return {"model": str(model), "prompt": "Hi", "stream": True, "fake": {"tokens": 100000, "delay": 0.05}}


@pytest.mark.parametrize("ignore_sigterm", [False, True])
def test_a_second_signal_ends_everything_at_once(tmp_path: Path, ignore_sigterm: bool) -> None:
    model = make_model(tmp_path / "m", ignore_sigterm=ignore_sigterm)
    with serving(model, "--drain-timeout", "600", "--stop-timeout", "600") as served:
        served.wait_for_state("ready")
        engine = served.engine_pids()[0]
        with httpx.stream("POST", f"{served.url}/v1/completions", json=_endless(model), timeout=LIMIT) as response:
            next(response.iter_lines())
            served.process.send_signal(signal.SIGTERM)
            served.wait_for_state("draining")
            served.process.send_signal(signal.SIGTERM)
            assert served.wait_for_exit() == 128 + signal.SIGTERM
        assert not alive(engine)


def test_sigterm_while_the_engine_loads_stops_it(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m", hang=True)) as served:
        served.wait_for_state("loading")
        engine = served.engine_pids()[0]
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0
        assert not alive(engine)


def test_a_taken_port_ends_serve_before_the_engine_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(AssertionError, match=rf"cannot listen on 127\.0\.0\.1 port {port}"),
            serving(model, "--port", port),
        ):
            pytest.fail("it serves on a taken port")
    assert not (model / "starts").exists()


def test_a_log_of_json_has_no_other_line_from_start_to_end(tmp_path: Path) -> None:
    lines = ("INFO 11-29 21:39:27 [x.py:1] said", "  plain  ", '{"half": ', "Traceback (most recent call last):")
    model = make_model(tmp_path / "m", print_lines=lines, fail_first=1)
    keys = tmp_path / "keys.json"
    key = add_key(keys, "ann")
    with serving(model, "--log-format", "json", "--keys-file", str(keys)) as served:
        served.wait_for_state("ready")
        headers = {"authorization": f"Bearer {key}"}
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "Hi"}, headers=headers)
        with socket.create_connection(served.url.removeprefix("http://").split(":"), LIMIT) as sock:  # type: ignore[arg-type]
            sock.sendall(b"nonsense\r\n\r\n")
            assert b"400" in sock.recv(1000)
        os.kill(served.engine_pids()[0], signal.SIGKILL)
        served.wait_for_state("failed")
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_exit()
    records = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert {"listening", "state", "ready", "try", "request", "request refused", "stopped", *lines[:1]} <= {
        record["event"] for record in records
    }
    shown = next(record["command"] for record in records if record["event"] == "try")
    assert "Authorization: Bearer YOUR_KEY" in shown
    assert key not in served.log.read_text()


@pytest.mark.parametrize(
    ("flags", "env", "code"),
    [
        (["--model", "/nonexistent", "--log-format", "json"], {}, 65),
        (["--nonsense", "--log-format=json"], {}, 2),
        ([], {"VOLTSERVE_LOG_FORMAT": "json"}, 2),
        (["deploy", "--log-format", "json"], {}, 2),
        (["deploy", "--config"], {"VOLTSERVE_LOG_FORMAT": "json"}, 2),
        (["deploy", "--config", "c", "--no-gateway", "--gateway-only", "--log-format", "json"], {}, 2),
    ],
)
def test_an_error_before_the_start_is_a_line_of_json_too(flags: list[str], env: dict[str, str], code: int) -> None:
    program = "import sys; from server.cli import app; app(prog_name='voltserve')"
    command = [sys.executable, "-c", program, *flags] if "deploy" in flags else [sys.executable, "-m", "server", *flags]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "")
    (record,) = map(json.loads, ended.stderr.splitlines())
    assert (record["level"], record["exit_code"]) == ("error", code)


def test_warnings_and_what_nothing_catches_are_lines_of_json_too() -> None:
    code = """if 1:
        import threading, warnings
        from server import logs
        logs.no_plain_lines()
        warnings.warn("this is odd")
        def fail(): raise ValueError("in a thread")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        raise KeyError("a bug")
    """
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    events = [json.loads(line)["event"] for line in ended.stderr.splitlines()]
    assert "this is odd" in events[0]
    assert events[1:] == ["uncaught ValueError: in a thread", "uncaught KeyError: 'a bug'"]


def test_the_runtime_folder_is_private_and_removed(model: Path) -> None:
    with serving(model) as served:
        served.wait_for_state("ready")
        folder = Path(next(word for word in served.engine_argv() if word.endswith("engine.sock"))).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0
        assert not folder.exists()


def test_the_runtime_folder_of_a_killed_server_is_removed_by_the_next(tmp_path: Path, short_tmp: Path) -> None:
    env = {"TMPDIR": str(short_tmp)}
    with serving(make_model(tmp_path / "m1"), env=env) as killed:
        killed.wait_for_state("ready")
        killed.process.kill()
        killed.wait_for_exit()
    (left,) = short_tmp.glob("voltserve-*")
    with serving(make_model(tmp_path / "m2"), env=env) as served:
        served.wait_for_state("ready")
        (own,) = short_tmp.glob("voltserve-*")
        assert own != left
        with serving(make_model(tmp_path / "m3"), env=env) as beside:
            beside.wait_for_state("ready")
            assert len(list(short_tmp.glob("voltserve-*"))) == 2, "one that lives stays"
        assert served.post().status_code == 200
    assert not list(short_tmp.glob("voltserve-*"))


async def test_no_room_for_a_socket_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", _refuse)
    with pytest.raises(PreflightError, match=r"progress\.sock: No space left on device; set TMPDIR"):
        await receive_progress(Path("/nowhere/progress.sock"), print, print)


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_runtime_folder_that_cannot_be_written_for_a_while_delays_a_restart_only(
    tmp_path: Path, short_tmp: Path
) -> None:
    with serving(make_model(tmp_path / "m"), env={"TMPDIR": str(short_tmp)}) as served:
        served.wait_for_state("ready")
        (folder,) = short_tmp.glob("voltserve-*")
        engine = served.engine_pids()[0]
        (folder / "engine.sock").unlink()
        (folder / "engine.sock").mkdir()  # which cannot be unlinked, as on a file system that went read-only
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: "cannot be started: " in str(served.health()[1]["last_exit"]), "a start that cannot be")
        (folder / "engine.sock").rmdir()
        served.wait_for_state("ready")


def test_sighup_is_an_orderly_end_however_often_it_comes(tmp_path: Path, short_tmp: Path) -> None:
    env = {"TMPDIR": str(short_tmp)}
    with serving(make_model(tmp_path / "m"), env=env) as served:
        served.wait_for_state("ready")
        results: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: results.append(served.post(stream=True, fake=SLOW)))
        thread.start()
        wait_for(lambda: served.stats()["running"] == 1, "a stream runs")
        served.process.send_signal(signal.SIGHUP)
        assert served.wait_for_state("draining")["reason"] == "SIGHUP came"
        served.process.send_signal(signal.SIGHUP)
        thread.join(LIMIT)
        assert "[DONE]" in results[0].text
        assert served.wait_for_exit() == 0
    assert not list(short_tmp.glob("voltserve-*"))


def test_under_nohup_a_terminal_may_close(model: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server inherits it
    try:
        with serving(model) as served:
            served.wait_for_state("ready")
            served.process.send_signal(signal.SIGHUP)
            assert served.post(fake=SLOW).status_code == 200
            assert served.health()[1]["state"] == "ready"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_streams_of_an_engine_that_hangs_end_when_it_is_given_up_and_not_when_it_is_gone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", ignore_sigterm=True)
    flags = ("--heartbeat-timeout", "0.5", "--step-timeout", "1", "--hang-timeout", "0.5", "--stop-timeout", "8")
    with serving(model, *flags) as served:
        served.wait_for_state("ready")
        engine = served.engine_pids()[0]
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(served.post(stream=True, fake=SLOW).text))
        thread.start()
        wait_for(lambda: served.stats()["running"] == 1, "a stream runs")
        (model / "hung").touch()
        served.wait_for_state("failed")
        thread.join(LIMIT)
        assert alive(engine), "the stream ended only with the engine"
        assert "the engine broke off this request (it was given up); the engine is failed: hung: " in texts[0]
        (model / "hung").unlink()
        served.wait_for_state("ready")


def test_the_server_answers_quickly_while_the_engine_is_stopped(model: Path) -> None:
    with serving(model, "--heartbeat-timeout", "0.3", "--stop-timeout", "0.5") as served:
        served.wait_for_state("ready")
        engine = served.engine_pids()[0]
        os.kill(engine, signal.SIGSTOP)
        served.wait_for_state("degraded")
        assert served.post().status_code == 503
        os.kill(engine, signal.SIGCONT)
        served.wait_for_state("ready")
