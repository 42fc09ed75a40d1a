"""What one request asks for harms that request only: the engine's processes and others' texts stay as they are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import Service

pytestmark = pytest.mark.e2e
PATIENCE = httpx.Timeout(180)
SELF_REFERENCE = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def completion(service: Service, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": "Hello, my name is", "max_tokens": 8, "temperature": 0} | fields
    return httpx.post(f"{service.url}/v1/completions", json=body | {"model": name(service)}, timeout=PATIENCE)


def name(service: Service) -> str:
    found: str = httpx.get(f"{service.url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
    return found


def streamed(service: Service, **fields: Any) -> str:
    """The text of a stream, and its error where it has one."""
    body = {"model": name(service), "prompt": "The city of Paris", "max_tokens": 60, "temperature": 1, "seed": 3}
    text = ""
    with httpx.stream(
        "POST",
        f"{service.url}/v1/completions",
        json=body | {"stream": True, "ignore_eos": True} | fields,
        timeout=PATIENCE,
    ) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["text"] if "choices" in event else f"<{event['error']['message']}>"
    return text


@pytest.fixture(scope="module")
def unharmed(service: Service) -> Iterator[Service]:
    """The service, with streams beside that must give what they give alone, in processes that stay."""
    alone = streamed(service)
    processes = {process.pid for process in service.processes()}
    texts: list[str] = []
    done = threading.Event()

    def keep_streaming() -> None:
        while not done.is_set():
            texts.append(streamed(service))

    beside = threading.Thread(target=keep_streaming)
    beside.start()
    try:
        yield service
    finally:
        done.set()
        beside.join()
    assert texts == [alone] * len(texts)
    assert texts
    assert processes <= {process.pid for process in service.processes()}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a number that no logits survive": ("repetition_penalty", {"repetition_penalty": 1e-38}),
    "an infinite temperature": ("temperature", {"temperature": 1e308}),
    "a prompt's token": ("prompt", {"prompt": [49152]}),
    "a token of one of several prompts": ("prompt", {"prompt": [[1, 2], [49152]]}),
    "a stream's prompt": ("prompt", {"prompt": [49152], "stream": True}),
    "a stop token too high": ("stop_token_ids", {"stop_token_ids": [999999], "min_tokens": 1}),
    "a stop token too low": ("stop_token_ids", {"stop_token_ids": [-60000], "min_tokens": 1}),
    "an allowed token": ("allowed_token_ids", {"allowed_token_ids": [49152]}),
    "a biased token": ("logit_bias", {"logit_bias": {"49152": 1}}),
    "a number beyond 64 bits": ("top_k", {"top_k": 2**70, "temperature": 1}),
    "a schema that is itself": (
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SELF_REFERENCE}}},
    ),
    "a bad schema in a tag": (
        "structured_outputs",
        {"structured_outputs": {"structural_tag": '{"structures":[{"begin":"<a>","schema":5}],"triggers":["<b"]}'}},
    ),
    "a grammar without end": ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= root"}}),
    "a regex as deep as a stack": (
        "structured_outputs.regex",
        {"structured_outputs": {"regex": "(" * 9999 + ")" * 9999}},
    ),
}


@pytest.mark.parametrize(("field", "fields"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_by_its_field(unharmed: Service, field: str, fields: dict[str, Any]) -> None:
    reply = completion(unharmed, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "the least top_p is greedy": ({"top_p": 1e-300, "temperature": 1}, " Emily Wilson, a 28-"),
    "left recursion": ({"structured_outputs": {"grammar": 'root ::= root "a" | "b"'}}, "b"),
    "an empty alternative": ({"structured_outputs": {"regex": "^(|.*)$"}}, ""),
    "an empty grammar": ({"structured_outputs": {"grammar": "root ::= "}}, ""),
    "many repetitions": ({"structured_outputs": {"regex": "a{1000000}"}}, "aaaaaaaa"),
    "a choice after other backends' grammars": ({"structured_outputs": {"choice": ["42"]}}, "42"),
}


@pytest.mark.parametrize(("fields", "begins"), TEXTS.values(), ids=TEXTS)
def test_what_can_be_done_is_done(unharmed: Service, fields: dict[str, Any], begins: str) -> None:
    reply = completion(unharmed, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"].startswith(begins)


@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
def test_where_no_token_is_possible_the_request_fails(unharmed: Service, temperature: float) -> None:
    none = {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [5], "temperature": temperature}
    for stream in (False, True):  # a stream's head waits for the first token, so it can say 500, too
        reply = completion(unharmed, stream=stream, **none)
        assert reply.status_code == 500, reply.text
        assert "no token is possible" in reply.json()["error"]["message"]


def test_a_seed_gives_the_same_text_in_any_company(unharmed: Service) -> None:
    seeded = {"seed": 7, "temperature": 1, "top_p": 0.9, "max_tokens": 24, "prompt": "Once upon a time"}
    texts: list[str] = []

    def ask(fields: dict[str, Any]) -> None:
        texts.append(completion(unharmed, **fields).json()["choices"][0]["text"])

    ask(seeded)
    for mates in (1, 3):
        beside = [threading.Thread(target=ask, args=({"temperature": 1, "max_tokens": 24},)) for _ in range(mates)]
        for thread in beside:
            thread.start()
        texts.append(completion(unharmed, **seeded).json()["choices"][0]["text"])
        assert texts[-1] == texts[0]
        for thread in beside:
            thread.join()


STOPS: dict[str, dict[str, Any]] = {
    "across tokens": {"stop": ["son, a"]},
    "the first of several": {"stop": ["never", "28", "Wilson"]},
    "kept": {"stop": ["Wilson"], "include_stop_str_in_output": True},
    "no ASCII": {"structured_outputs": {"choice": ["ab ü€😀 cd"]}, "stop": ["€😀"]},
}


@pytest.mark.parametrize("fields", STOPS.values(), ids=STOPS)
def test_a_stream_stops_where_the_whole_text_does(unharmed: Service, fields: dict[str, Any]) -> None:
    asked = {"prompt": "Hello, my name is", "temperature": 0, "max_tokens": 24, "seed": None} | fields
    whole = completion(unharmed, **asked).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert streamed(unharmed, **asked, ignore_eos=False) == whole["text"]
    kept = fields.get("include_stop_str_in_output", False)
    assert any(whole["text"].endswith(stop) for stop in fields["stop"]) == kept
