from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from trials import cpu_servers
from trials.cpu_report import report
from trials.cpu_servers import TOKENS, Server, measure, tokens_of


def event(delta: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def answer(tokens: int) -> bytes:
    return event({"role": "assistant", "content": ""}) + event({"content": " sea"}) * tokens + b"data: [DONE]\n\n"


def test_tokens_are_what_the_usage_says_or_else_the_events_with_text() -> None:
    assert tokens_of(answer(5)) == 5
    assert tokens_of(b"") == 0
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
    assert tokens_of(event({"content": " several tokens"}) + usage) == 7


def test_a_measurement_counts_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []

    def post(_server: Server, body: dict[str, Any]) -> tuple[int, bytes]:
        prompts.append(body["messages"][0]["content"])
        return 200, answer(TOKENS)

    monkeypatch.setattr(cpu_servers, "post", post)
    monkeypatch.setattr("time.monotonic", iter([10.0, 12.0]).__next__)
    server = Server("fake", [])
    measure(server, 8, first=100)
    assert server.rates == {1: [], 8: [8 * TOKENS / 2.0]}
    assert len(set(prompts)) == 8


@pytest.mark.parametrize(
    ("status", "tokens", "message"), [(500, TOKENS, "expected status 200, got 500"), (200, 3, r"got \[3\]")]
)
def test_a_server_that_fails_or_stops_early_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, status: int, tokens: int, message: str
) -> None:
    monkeypatch.setattr(cpu_servers, "post", lambda *_: (status, answer(tokens)))
    with pytest.raises(SystemExit, match=f"fake: .*{message}"):
        measure(Server("fake", []), 1, first=1)


def test_ratios_are_of_medians_and_of_the_best_dtype() -> None:
    rates = {
        "voltserve": (80.0, 100.0, 90.0),
        "vLLM a": (30.0, 10.0, 20.0),
        "vLLM b": (40.0, 30.0, 5.0),
        "llama.cpp": (60.0,),
    }
    servers = [Server(name, [], ready_s=[1.0], rates={1: list(of), 8: list(of)}) for name, of in rates.items()]
    made: dict[str, Any] = report(servers, {}, Namespace(rounds=3))
    assert made["ratios"]["x1 over vLLM's best dtype"] == 3.0
    assert made["ratios"]["x8 over llama.cpp"] == 1.5
