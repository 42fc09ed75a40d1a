"""Engines on demand as one server process: swaps, faults in the middle of them, and ends that leave nothing."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import LIMIT, Served, alive, make_model, serving, wait_for

BROKEN = "QuantError: a (b): expected finite values, got nan in bfloat16"


def write_file(folder: Path, **models: str) -> Path:
    """An engines file: each model's own lines, after its name and flags. `flags: {…}` adds flags."""
    lines = ["schema: 1", "models:"]
    for name, own in models.items():
        keys = own.split("; ")
        more = "".join(f", {key.removeprefix('flags: ')}" for key in keys if key.startswith("flags: "))
        lines += [f"  - name: {name}", f"    flags: {{model: {folder / name}, served-model-name: [{name}]{more}}}"]
        lines += [f"    {key}" for key in keys if not key.startswith("flags: ")]
    file = folder / "engines.yaml"
    file.write_text("\n".join(lines))
    return file


Starts = dict[str, dict[str, Any]]  # per model: what its fake engine is to do
QUICK = "on_demand: true; min_residence: 0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as it was: of its models one runs at a time."""
    folder = tmp_path_factory.mktemp("shared")
    starts: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {},
        "slow": {"load_seconds": 30},
        "slower": {"load_seconds": 30},
        "broken": {"print_lines": [BROKEN], "fail_first": 99},
        "hanging": {"hang": True, "ignore_sigterm": True, "spawn": True},
    }
    for name, fake in starts.items():
        make_model(folder / name, **fake)
    own = dict.fromkeys(starts, QUICK)
    own["slower"] += "; flags: queue-size: 1"
    own["hanging"] += "; flags: start-timeout: 2, stop-timeout: 0.5"
    file = write_file(folder, **own)
    with serving(folder / "a", "--engines", str(file), with_model=False) as served:
        assert served.health()[0] == 200
        assert served.engine_pids() == []
        yield served


@contextlib.contextmanager
def swapping(folder: Path, *flags: str, starts: Starts | None = None) -> Iterator[Served]:
    """Models a and b, of which one runs at a time, in a server of fake engines."""
    for name in ("a", "b"):
        make_model(folder / name, **(starts or {}).get(name, {}))
    file = write_file(folder, a=QUICK, b=QUICK)
    with serving(folder / "a", "--engines", str(file), *flags, with_model=False) as served:
        yield served


def engine(served: Served, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in served.health()[1]["engines"] if one["name"] == name)
    return found


def reached(served: Served, name: str, state: str) -> None:
    wait_for(lambda: engine(served, name)["state"] == state, f"{name} {state}:\n{served.log.read_text()[-2000:]}")


class Asking(threading.Thread):
    """A request under way."""

    def __init__(self, served: Served, model: str, **body: Any) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self.error: Exception | None = None
        self._ask = lambda: served.post(model=model, **body)
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._ask()
        except httpx.HTTPError as error:
            self.error = error

    def result(self) -> httpx.Response:
        self.join(LIMIT)
        assert self.answer is not None, self.error
        return self.answer


def test_models_take_turns_one_process_at_a_time_and_nothing_is_lost(shared: Served) -> None:
    for model in ("a", "b", "a"):
        assert shared.post(model=model).json()["model"] == model
        assert len(shared.engine_pids()) == 1
    under_way = [Asking(shared, "a", stream=True, fake={"tokens": 20, "delay": 0.05}) for _ in range(3)]
    wait_for(lambda: shared.stats()["running"] == 3, "under way")
    assert shared.post(model="b").json()["model"] == "b"
    assert all(one.result().text.endswith("data: [DONE]\n\n") for one in under_way), "they ended first"
    text = httpx.get(f"{shared.url}/metrics").text
    assert 'voltserve_demand_starts_total{replica="a"} 2.0' in text
    assert 'voltserve_demand_stops_total{reason="swap",replica="a"} 2.0' in text
    assert 'voltserve_engine_restarts_total{replica="a"} 0.0' in text, "a start on demand is no restart"
    log = shared.log.read_text()
    assert "shares the CPU with b, slow, slower, broken, hanging; one of them runs at a time" in log
    assert log.count("serves a") == 1, "ready is told once"


def test_an_engine_killed_in_its_start_is_told_to_who_waits_and_the_other_model_goes_on(shared: Served) -> None:
    asked = Asking(shared, "slow")
    reached(shared, "slow", "loading")
    os.kill(shared.engine_pids()[0], signal.SIGKILL)
    answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "start_failed")
    assert "SIGKILL" in answer.text or "memory" in answer.text
    assert shared.engine_pids() == []
    assert shared.post(model="a").status_code == 200
    assert shared.post(model="slow").status_code == 503
    assert (shared.model.parent / "slow/starts").read_text() == "1"


def test_an_engine_killed_while_it_drains_makes_room_all_the_same(shared: Served) -> None:
    slow = Asking(shared, "a", fake={"tokens": 100, "delay": 0.1})
    reached(shared, "a", "ready")
    wait_for(lambda: shared.stats()["running"], "under way")
    asked = Asking(shared, "b")
    reached(shared, "a", "draining")
    os.kill(shared.engine_pids()[0], signal.SIGKILL)
    assert slow.result().status_code == 502
    assert asked.result().json()["model"] == "b"


def test_an_engine_that_never_comes_up_fails_at_its_limit_and_leaves_nothing(shared: Served) -> None:
    answer = shared.post(model="hanging")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "start_failed")
    assert not alive(int((shared.model.parent / "hanging/child.pid").read_text()))
    assert shared.engine_pids() == []


def test_a_failure_that_lasts_is_tried_once_and_the_server_stays(shared: Served) -> None:
    first = shared.post(model="broken")
    assert first.json()["error"]["code"] == "start_failed"
    assert int(first.headers["retry-after"]) > 500
    assert [shared.post(model="broken").status_code for _ in range(5)] == [503] * 5
    assert (shared.model.parent / "broken/starts").read_text() == "1"
    assert shared.health()[0] == 503
    assert engine(shared, "broken")["diagnosis"]["cause"] in first.json()["error"]["message"]
    assert shared.post(model="a").status_code == 200


def test_a_client_that_leaves_frees_its_place_and_a_start_that_others_want(shared: Served) -> None:
    curl = ["curl", "-sN", f"{shared.url}/v1/completions", "-H", "Content-Type: application/json"]
    client = subprocess.Popen([*curl, "-d", '{"model": "slower", "prompt": "Hi"}'])
    wait_for(lambda: engine(shared, "slower")["on_demand"]["waiting"] == 1, "it waits")
    assert shared.post(model="slower").json()["error"]["code"] == "queue_full"
    client.kill()
    client.wait()
    assert shared.post(model="b").status_code == 200, "nobody waits for slower any more"


@pytest.mark.parametrize("moment", ["starting", "draining", "stopping"])
def test_sigterm_ends_in_order_at_every_moment_of_a_swap(tmp_path: Path, moment: str) -> None:
    starts: Starts = {
        "a": {"ignore_sigterm": moment == "stopping"},
        "b": {"load_seconds": 30.0 * (moment == "starting")},
    }
    flags = ("--drain-timeout", "1", "--stop-timeout", "1.5")
    with swapping(tmp_path, *flags, starts=starts) as served:
        slow = Asking(served, "a", fake={"tokens": 100 if moment == "draining" else 1, "delay": 0.1})
        reached(served, "a", "ready")
        if moment == "draining":
            wait_for(lambda: served.stats()["running"], "under way")
        else:
            assert slow.result().status_code == 200
        running = served.engine_pids()
        asked = Asking(served, "b")
        reached(served, *{"starting": ("b", "loading")}.get(moment, ("a", "draining")))
        running += served.engine_pids()
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0
        assert asked.result().status_code == 503
        slow.join(LIMIT)
        assert not [pid for pid in running if alive(pid)]


def test_a_kill_of_the_server_during_a_swap_leaves_no_engine(tmp_path: Path) -> None:
    starts: Starts = {"a": {"ignore_sigterm": True, "spawn": True}, "b": {"load_seconds": 30}}
    with swapping(tmp_path, "--stop-timeout", "20", starts=starts) as served:
        assert served.post(model="a").status_code == 200
        asked = Asking(served, "b")
        reached(served, "a", "draining")
        pids = served.engine_pids()
        served.process.send_signal(signal.SIGKILL)
        served.process.wait(LIMIT)
        asked.join(LIMIT)
        assert asked.error is not None
        wait_for(lambda: not [pid for pid in pids if alive(pid)], "the engine follows its supervisor")
        with contextlib.suppress(ProcessLookupError):  # the fake's child is tied to nobody, unlike vLLM's
            os.kill(int((tmp_path / "a/child.pid").read_text()), signal.SIGKILL)


def test_a_second_signal_during_a_swap_ends_at_once(tmp_path: Path) -> None:
    with swapping(tmp_path, "--stop-timeout", "60", starts={"a": {"ignore_sigterm": True}}) as served:
        assert served.post(model="a").status_code == 200
        asked = Asking(served, "b")
        reached(served, "a", "draining")
        pids = served.engine_pids()
        for _ in range(2):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        began = time.monotonic()
        assert served.wait_for_exit() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20
        asked.join(LIMIT)
        assert not [pid for pid in pids if alive(pid)]


def test_an_always_on_model_and_a_pinned_one_run_beside_those_that_swap(tmp_path: Path) -> None:
    for name in ("always", "kept", "a", "b"):
        make_model(tmp_path / name)
    kept = "on_demand: true; pinned: true"
    file = write_file(tmp_path, always="replicas: [{}]", kept=kept, a=QUICK, b=f"{QUICK}; idle_timeout: 0.5")
    with serving(tmp_path / "a", "--engines", str(file), with_model=False) as served:
        assert served.health()[0] == 503, "always is not ready yet"
        wait_for(lambda: served.health()[0] == 200, "always is ready, and the others can be started")
        assert {name: engine(served, name)["state"] for name in ("always", "kept", "a")} == {
            "always": "ready",
            "kept": "stopped",
            "a": "stopped",
        }
        for model in ("kept", "a", "b", "always"):
            assert served.post(model=model).json()["model"] == model
        assert {name: engine(served, name)["state"] for name in ("kept", "a")} == {"kept": "ready", "a": "stopped"}
        reached(served, "b", "stopped")
        assert engine(served, "b")["reason"] == "no request for 0.5 s"
        assert served.health()[0] == 200
        os.kill(served.engine_pids()[0], signal.SIGKILL)  # always, the first that was started
        wait_for(lambda: served.health()[0] == 503, "it is missed")
        wait_for(lambda: served.health()[0] == 200, "and back")
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0
