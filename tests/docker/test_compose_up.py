"""`docker compose up` without a GPU: the real engine, the real Prometheus, an OpenAI client. In this order."""

from __future__ import annotations

import functools
import json
import re
import threading

import httpx
import pytest
from openai import OpenAI

from tests.waiting import wait_until

from .conftest import IMAGE, LIMIT_S, ROOT, SERVED_NAME, START_LIMIT_S, Project, docker, inspect

DASHBOARD = json.loads((ROOT / "configs/grafana/dashboards/voltserve.json").read_text())


@pytest.fixture
def client(up: Project) -> OpenAI:
    return OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
def container(up: Project) -> str:
    return up.container("cpu")


def test_the_container_is_healthy_once_the_engine_is_ready_and_not_before(up: Project, container: str) -> None:
    assert inspect(container)["Config"]["Image"] == IMAGE
    states: list[tuple[str, str]] = []

    def healthy() -> bool:
        try:
            state = up.health()["state"]
        except httpx.TransportError:
            state = "absent"
        states.append((inspect(container)["State"]["Health"]["Status"], state))
        return states[-1][0] != "starting"

    wait_until(healthy, START_LIMIT_S, "the end of the health check's state `starting`")
    assert states[-1] == ("healthy", "ready")
    assert {health for health, state in states if state != "ready"} == {"starting"}


def test_the_model_is_named_by_the_path_it_is_mounted_at(client: OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [SERVED_NAME]


def test_an_openai_client_gets_completions_and_streams(client: OpenAI) -> None:
    reply = client.completions.create(model=SERVED_NAME, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in reply.choices[0].text
    chinese = client.completions.create(
        model=SERVED_NAME, prompt="请用一句话介绍巴黎。", max_tokens=128, temperature=0.7
    )
    assert chinese.choices[0].text.strip()
    stream = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text


def test_settings_in_the_env_file_reach_the_engine(container: str) -> None:
    command = docker("logs", container).stdout + docker("logs", container).stderr
    assert "--max-num-seqs 4" in command


def test_the_container_can_do_no_more_than_serve(container: str) -> None:
    host = inspect(container)["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    status = docker("exec", container, "cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert fields["Name"] == "tini"
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    for place in ("/opt/voltserve/x", "/models/quasar-nvfp4/x", "/etc/x"):
        assert docker("exec", container, "touch", place, check=False).returncode != 0, place
    for place in ("/tmp/x", "/var/cache/voltserve/x", "/keys/x"):  # noqa: S108
        assert docker("exec", container, "touch", place, check=False).returncode == 0, place


def test_only_this_machine_reaches_the_port(container: str) -> None:
    bindings = inspect(container)["HostConfig"]["PortBindings"]["8000/tcp"]
    assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"]


def test_prometheus_scrapes_engine_and_gateway_and_has_loaded_every_alert(up: Project) -> None:
    wait_until(lambda: up.query('up{job="voltserve"} == 1'), LIMIT_S, "a scrape")
    tokens = wait_until(lambda: up.query("vllm:generation_tokens_total > 0"), LIMIT_S, "the engine's tokens")
    assert tokens[0]["metric"]["model_name"] == SERVED_NAME
    assert [one["metric"]["state"] for one in up.query("voltserve_state == 1")] == ["ready"]
    rules = httpx.get(f"http://127.0.0.1:{up.prometheus_port}/api/v1/rules", timeout=LIMIT_S).json()
    loaded = [rule for group in rules["data"]["groups"] for rule in group["rules"]]
    assert len(loaded) == (ROOT / "configs/prometheus/rules.yml").read_text().count("- alert:")
    assert {rule["health"] for rule in loaded} <= {"ok", "unknown"}


@pytest.mark.parametrize(
    "panel", [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"], ids=lambda p: p["title"]
)
def test_each_panel_of_the_dashboard_gets_data(up: Project, panel: dict[str, object]) -> None:
    for target in panel["targets"]:  # type: ignore[attr-defined]
        expression = target["expr"]
        if "_gpu_" in expression or "refused" in expression:  # none here, and none refused
            up.query(expression)
        else:  # a rate needs two scrapes
            wait_until(functools.partial(up.query, expression), LIMIT_S, expression)


def test_a_killed_engine_comes_back_inside_the_same_container(up: Project, client: OpenAI, container: str) -> None:
    kill = (
        "import os, pathlib, signal\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    if b'-m\\0engine\\0' in p.read_bytes(): os.kill(int(p.parent.name), signal.SIGKILL)\n"
    )
    docker("exec", container, "python", "-c", kill)
    body = wait_until(
        lambda: (body := up.health())["state"] != "ready" and body["last_exit"] and body, LIMIT_S, "the engine's death"
    )
    assert "SIGKILL" in json.dumps(body["last_exit"])
    refused = httpx.post(f"{up.url}/v1/completions", json={"model": SERVED_NAME, "prompt": "Hi"}, timeout=LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_ready")
    wait_until(lambda: up.health()["state"] == "ready", START_LIMIT_S, "the engine's return")
    reply = client.completions.create(model=SERVED_NAME, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in reply.choices[0].text
    assert inspect(container)["RestartCount"] == 0
    wait_until(lambda: up.query("voltserve_engine_restarts_total == 1"), LIMIT_S, "the one restart in Prometheus")


def test_keys_are_made_in_the_container_and_last(up: Project) -> None:
    key = docker("exec", up.container("cpu"), "voltserve", "keys", "add", "alice", "--file", "/keys/keys.json")
    assert key.stdout.startswith("vs-")
    listed = up.compose(
        "run",
        "--rm",
        "-T",
        "--no-deps",
        "--entrypoint",
        "voltserve",
        "cpu",
        "keys",
        "list",
        "--file",
        "/keys/keys.json",
    )
    assert "alice" in listed.stdout


def test_compose_stop_lets_a_running_answer_finish(up: Project, container: str) -> None:
    body = {"model": SERVED_NAME, "prompt": "Count: 1, 2, 3,", "max_tokens": 150, "ignore_eos": True, "stream": True}
    answers: list[list[str]] = []

    def ask_until_refused() -> None:  # so an answer is in flight when the signal arrives, at any time
        try:
            while True:
                with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=START_LIMIT_S) as reply:
                    if reply.status_code != 200:
                        return
                    answers.append([])
                    answers[-1].extend(line for line in reply.iter_lines() if line)
        except httpx.TransportError:  # the listener is closed
            return

    asking = threading.Thread(target=ask_until_refused)
    asking.start()
    wait_until(lambda: answers, LIMIT_S, "the first answer's begin")
    up.compose("stop", "cpu")
    asking.join(LIMIT_S)
    logs = docker("logs", container)
    assert re.search(r"draining\s+in_flight=1", logs.stdout + logs.stderr)
    assert [answer[-1] for answer in answers] == ["data: [DONE]"] * len(answers)
    assert json.loads(answers[-1][-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    state = inspect(container)["State"]
    assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 0, False)
