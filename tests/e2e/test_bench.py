"""`voltserve bench`, `monitor` and smoke's questions on the real engine. They leave the shared service as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from server.bench.load import Closed, Open
from server.bench.prompts import find_target
from server.bench.run import BenchSettings, run_bench
from server.run.child import Service as Running
from server.smoke.checks import Conversation, ask_in_two_languages

from .conftest import MODEL, Service

pytestmark = pytest.mark.e2e

GENERATED, PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"


def test_every_token_that_bench_reports_is_one_that_the_engine_counted(service: Service) -> None:
    before = {name: service.metric(name) for name in (GENERATED, PROMPT)}
    settings = BenchSettings(input_len=24, output_len=12, levels=(Closed(4), Open(4.0)), requests=8)
    results = run_bench(find_target(service.url, ""), settings)
    outcomes = [outcome for result in results for outcome in result.outcomes]
    assert [outcome.error for outcome in outcomes] == [""] * 16
    assert all(0 < len(outcome.events) <= 12 for outcome in outcomes)
    warmups = sum(result.warmup.requests for result in results)
    # Beside the measured requests: one for the tokens to draw from (1 token), and the warm-ups, which are no longer.
    assert service.metric(GENERATED) - before[GENERATED] == (16 + warmups) * 12 + 1
    pool = service.metric(PROMPT) - before[PROMPT] - (16 + warmups) * 24
    assert 100 < pool < 1000, "some 250 tokens are a thousand characters of English"


def test_bench_writes_its_page_about_the_running_service(service: Service, tmp_path: Path) -> None:
    flags = ["--url", service.url, "--concurrency", "2", "--requests", "4", "--input-len", "16", "--output-len", "8"]
    command: list[str | Path] = [Path(sys.executable).with_name("voltserve"), "bench", *flags, "--out", tmp_path]
    subprocess.run(command, check=True, timeout=300)
    value = json.loads((tmp_path / "bench.json").read_text())
    assert value["server"]["model"] == MODEL
    assert (value["levels"][0]["output_tokens"], value["warnings"]) == (32, [])
    assert "<svg" in (tmp_path / "index.html").read_text()


def test_monitor_sees_the_service_at_work(service: Service) -> None:
    monitor = Path(sys.executable).with_name("voltserve")
    command: list[str | Path] = [monitor, "monitor", "--url", service.url, "--count", "1"]
    line = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert (line["state"], line["model"], line["problem"]) == ("ready", MODEL, "")


def test_smoke_finds_the_models_answers_sound(service: Service) -> None:
    got = ask_in_two_languages(Conversation(Running(service.process, service.url, service.log), MODEL))
    assert got.verdict == "ok", got
