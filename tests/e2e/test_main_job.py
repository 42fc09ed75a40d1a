"""The main job end to end: a real NVFP4 model, the real engine, an OpenAI client. One engine start for the module."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from quant.calibration_text import Text
from quant.evaluate.server import ServerModel
from tests.waiting import wait_until

from .conftest import MODEL, ROOT, Service, serving

pytestmark = pytest.mark.e2e


@pytest.fixture
def client(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0)


def test_health_told_the_load_progress_before_it_said_ready(service: Service) -> None:
    states = [body["state"] for _, body in service.seen]
    assert states[-1] == "ready"
    assert {code for code, body in service.seen if body["state"] != "ready"} == {503}
    loading = [body["progress"] for _, body in service.seen if body["state"] == "loading"]
    assert any(p["phase"] == "weights" for p in loading) or any(p["phase"] == "warmup" for p in loading)
    print(f"cold start to ready: {service.cold_start_s:.1f} s")


def test_the_first_completion_of_a_sound_model_leaves_no_warning(service: Service) -> None:
    health = service.health()
    assert health is not None
    assert health[1]["warnings"] == []


def test_the_memory_plan_is_within_5_percent_of_what_the_engine_reports(service: Service) -> None:
    command = [str(Path(sys.executable).with_name("voltserve")), "plan", MODEL, "--against", str(service.log), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    rows = json.loads(done.stdout)
    assert {"weights_bytes", "cache_tokens"} <= {row["figure"] for row in rows}, "the engine did not report them"
    assert done.returncode == 0, rows


def test_the_served_model_is_named_by_the_path_given(client: OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == [MODEL]


def test_a_completion_knows_the_capital_of_france(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_chat_answers_in_sentences(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


def test_a_chinese_prompt_gives_valid_text(client: OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="你好,请介绍一下巴黎。", max_tokens=32, temperature=0.7, seed=1
    )
    assert reply.choices[0].text.strip()
    assert "\ufffd" not in reply.choices[0].text.rstrip("\ufffd")


def test_eval_measures_the_running_service(service: Service) -> None:
    model = ServerModel(service.url).connected()
    capitals = {city: model.score("The capital of France is", f" {city}") for city in ("Paris", "Rome", "Oslo")}
    assert max(capitals, key=lambda city: capitals[city]) == "Paris"
    text = Text("The sun rises in the east and sets in the west. " * 3, "a sentence")
    assert 1 < model.measure_text(text, tokens=20).perplexity < 30


def test_a_stream_equals_the_whole_reply_and_ends_with_one_usage(client: OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [24]
    assert chunks[-1].usage is not None
    assert len(chunks) > 10, "the reply came in one piece: not a true stream"


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "Count: one, two, three,", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**ask).choices[0].text  # type: ignore[call-overload]
    stop = free.strip().split()[2]
    reply = client.completions.create(**ask, stop=[stop])  # type: ignore[call-overload]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == free.split(stop)[0]


def test_a_cancelled_stream_frees_its_slot(client: OpenAI, service: Service) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="Tell me a long story",
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_until(lambda: service.metric("vllm:num_requests_running") == 1, 5, "the request runs")
    stream.close()
    wait_until(lambda: service.metric("vllm:num_requests_running") == 0, 5, "the slot is free")


def test_metrics_hold_both_sides_and_no_series_twice(service: Service) -> None:
    text = httpx.get(f"{service.url}/metrics").text
    samples = [
        (s.name, tuple(sorted(s.labels.items()))) for f in text_string_to_metric_families(text) for s in f.samples
    ]
    assert len(samples) == len(set(samples))
    names = {name for name, _ in samples}
    assert any(n.startswith("voltserve_") for n in names)
    assert "vllm:generation_tokens_total" in names
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))


def test_nothing_listens_beyond_loopback(service: Service) -> None:
    listening = {
        c.laddr.ip
        for p in service.processes()
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1"}


def test_engine_admin_routes_are_not_exposed(service: Service) -> None:
    for path in ("/scale_elastic_ep", "/v1/scale_elastic_ep", "/tokenize", "/inference/v1/generate", "/v1/nothing"):
        assert httpx.post(f"{service.url}{path}", json={}).status_code == 404, path


def test_a_killed_engine_turns_health_to_503_with_the_reason_and_comes_back(client: OpenAI, service: Service) -> None:
    engine = next(p for p in service.processes() if "-m engine" in " ".join(p.cmdline()))
    killed = time.monotonic()
    engine.send_signal(signal.SIGKILL)
    _, body = wait_until(lambda: (h := service.health()) and h[0] == 503 and h, 5, "503 after the engine was killed")
    assert time.monotonic() - killed < 5
    assert "SIGKILL" in body["reason"]
    service.wait_ready()
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in reply.choices[0].text
    assert service.metric("voltserve_engine_restarts_total") == 1


def test_sigterm_lets_a_stream_finish_and_leaves_no_process(client: OpenAI, service: Service) -> None:
    processes = service.processes()
    stream = client.completions.create(
        model=MODEL,
        prompt="Tell me a story",
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: (h := service.health()) and h[1]["state"] == "draining", 5, "draining")
    late = httpx.post(f"{service.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
    assert late.status_code == 503
    rest = list(chunks)
    assert rest[-1].choices[0].finish_reason == "length"
    assert service.process.wait(60) == 0
    assert "the engine died" not in service.log.read_text()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def engine_core(service: Service) -> psutil.Process:
    children = [p for p in service.processes() if "EngineCore" in " ".join([p.name(), *p.cmdline()])]
    assert children, "no EngineCore process: this engine runs in one process"
    return children[0]


def test_an_engine_core_that_hangs_or_dies_alone_is_noticed_and_repaired(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with serving(tmp_path / "log", "--step-timeout", "5") as service:
        core = engine_core(service)
        core.suspend()
        _, body = wait_until(lambda: (h := service.health()) and h[0] == 503 and h, 20, "503 while the core hangs")
        assert (body["state"], body["reason"]) == ("degraded", "its core has ended no step for 5 s (--step-timeout)")
        core.resume()
        service.wait_ready()
        assert service.metric("voltserve_engine_restarts_total") == 0
        core.send_signal(signal.SIGKILL)
        wait_until(lambda: (h := service.health()) and h[0] == 503, 5, "503 after EngineCore was killed")
        service.wait_ready()
