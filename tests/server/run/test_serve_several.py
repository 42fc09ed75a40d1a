"""Several engines as one server process: routing, a replica that dies and returns, an end that leaves nothing."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx

from tests.server.conftest import LIMIT, Served, alive, make_model, serving, wait_for

FILE = """
schema: 1
models:
  - name: one
    flags: {{model: {one}, served-model-name: [one]}}
    replicas: [{{}}, {{}}]
  - name: two
    flags: {{model: {two}, served-model-name: [two]}}
"""


def states(served: Served) -> dict[str, str]:
    return {one["name"]: one["state"] for one in served.health()[1]["engines"]}


def pids(served: Served) -> dict[str, list[int]]:
    """The engines' processes by model directory."""
    found: dict[str, list[int]] = {}
    for pid in served.engine_pids():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        found.setdefault(Path(words[words.index("--model") + 1]).name, []).append(pid)
    return found


def test_replicas_leave_and_return_and_all_end_together(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    file = tmp_path / "engines.yaml"
    file.write_text(FILE.format(one=one, two=two))
    with serving(one, "--engines", str(file), with_model=False) as served:
        wait_for(lambda: set(states(served).values()) == {"ready"}, f"all ready; {served.log.read_text()[-2000:]}")
        assert set(states(served)) == {"one-0", "one-1", "two"}
        for model in ("one", "two"):
            assert served.post(model=model).json()["model"] == model
        assert served.post(model="three").status_code == 404
        running = pids(served)
        assert {name: len(found) for name, found in running.items()} == {"one": 2, "two": 1}

        os.kill(running["one"][0], signal.SIGKILL)
        wait_for(lambda: set(states(served).values()) != {"ready"}, "a replica is missed")
        assert served.health()[0] == 200, "the other replica serves on"
        assert served.post(model="one").status_code == 200
        wait_for(lambda: set(states(served).values()) == {"ready"}, "it is back")
        text = httpx.get(f"{served.url}/metrics").text
        assert sum(f'voltserve_engine_restarts_total{{replica="one-{index}"}} 1.0' in text for index in (0, 1)) == 1
        assert 'voltserve_engine_restarts_total{replica="two"} 0.0' in text

        os.kill(running["two"][0], signal.SIGKILL)
        wait_for(lambda: served.health()[0] == 503, "no engine is left for a model")
        assert served.post(model="two").status_code in {502, 503}
        wait_for(lambda: served.health()[0] == 200, "it is back")
        assert "engine=two" in served.log.read_text(), "the log says which engine"
        last = [pid for found in pids(served).values() for pid in found]
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0
        assert not [pid for pid in last if alive(pid)]


NOT_FINITE = "QuantError: a (b): expected finite values, got nan in bfloat16"


def test_an_engine_that_can_never_work_is_given_up_while_others_go_on(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", print_lines=[NOT_FINITE], fail_first=99)
    file = tmp_path / "engines.yaml"
    file.write_text(FILE.format(one=one, two=two))
    with serving(one, "--engines", str(file), with_model=False) as served:

        def given_up() -> bool:
            return any("given up" in shown["reason"] for shown in served.health()[1]["engines"])

        wait_for(given_up, "it is given up")
        wait_for(lambda: set(states(served).values()) == {"ready", "failed"}, "the others are ready")
        assert states(served)["two"] == "failed"
        assert served.post(model="one").status_code == 200
        assert served.post(model="two").status_code == 503
        assert (two / "starts").read_text() == "1"
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 65


def test_serve_ends_once_no_engine_can_ever_work(tmp_path: Path) -> None:
    one, two = (make_model(tmp_path / name, print_lines=[NOT_FINITE], fail_first=99) for name in ("one", "two"))
    file = tmp_path / "engines.yaml"
    file.write_text(FILE.format(one=one, two=two))
    with serving(one, "--engines", str(file), with_model=False) as served:
        assert served.wait_for_exit() == 65
        assert (two / "starts").read_text() == "1"
        assert "serve ends" in served.log.read_text()


def test_of_two_replicas_one_that_hangs_loses_its_streams_and_nothing_else(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    file = tmp_path / "engines.yaml"
    file.write_text(FILE.format(one=one, two=two))
    flags = ("--heartbeat-timeout", "0.5", "--hang-timeout", "0.5", "--stop-timeout", "10")
    with serving(one, "--engines", str(file), *flags, with_model=False) as served:
        wait_for(lambda: set(states(served).values()) == {"ready"}, f"all ready; {served.log.read_text()[-2000:]}")
        answers: list[tuple[bool, httpx.Response]] = []

        def ask(stream: bool) -> None:
            answers.append((stream, served.post(model="one", stream=stream, fake={"tokens": 120, "delay": 0.05})))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, True, False, False) * 2]
        for thread in threads:
            thread.start()
            time.sleep(0.05)  # each goes to the least busy
        hung = pids(served)["one"][0]
        time.sleep(1.5)
        os.kill(hung, signal.SIGSTOP)
        wait_for(lambda: "failed" in states(served).values(), "the hung one is given up")
        for thread in threads:
            thread.join(LIMIT)
        assert alive(hung), "its requests ended only with it"
        assert [answer.status_code for _, answer in answers] == [200] * 8
        ends = ["engine_unavailable" in answer.text for stream, answer in answers if stream]
        assert set(ends) == {False, True}, "those of one replica end with an error, unless no byte had come"
        assert not any("error" in answer.text for stream, answer in answers if not stream)
        wait_for(lambda: set(states(served).values()) == {"ready"}, "it is back")
