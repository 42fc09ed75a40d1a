"""Protocol truth through the real engine: what OpenAI's clients rely on, whatever the model says."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any, NoReturn

import httpx
import jsonschema
import pytest

from tests.waiting import wait_until

from .conftest import MODEL, Service

pytestmark = pytest.mark.e2e

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


def ask(service: Service, path: str, **body: Any) -> httpx.Response:
    filled = {"model": MODEL, **({"prompt": "Hi"} if path == COMPLETIONS else {"messages": HELLO}), "max_tokens": 4}
    return httpx.post(f"{service.url}{path}", json={**filled, **body}, timeout=120)


def events(service: Service, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; fails where it does not end with [DONE]."""
    reply = ask(service, path, stream=True, **body)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [strict(line) for line in lines[:-1]]


def strict(text: str) -> Any:
    """RFC 8259 has no NaN and no Infinity; Python's parser would take them."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in JSON: {text}")

    return json.loads(text, parse_constant=refuse)


def texts(stream: list[dict[str, Any]]) -> list[str]:
    choices = [event["choices"][0] for event in stream if event["choices"]]
    return [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]


@pytest.mark.parametrize(("begin", "length"), [(8, 6), (15, 12), (20, 1)])
def test_no_part_of_a_stop_string_is_streamed(service: Service, begin: int, length: int) -> None:
    free: str = ask(service, COMPLETIONS, **STORY).json()["choices"][0]["text"]
    stop = free[begin : begin + length]
    whole = ask(service, COMPLETIONS, **STORY, stop=[stop]).json()["choices"][0]
    stream = events(service, COMPLETIONS, **STORY, stop=[stop])
    assert "".join(texts(stream)) == whole["text"] == free[: free.index(stop)]
    assert [event["choices"][0]["finish_reason"] for event in stream if event["choices"]][-1] == "stop"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_characters_of_several_tokens_are_streamed_whole(service: Service, path: str) -> None:
    text = "🙂🚀你好é"
    stream = events(service, path, structured_outputs={"choice": [text]}, max_tokens=40, temperature=0)
    assert "".join(texts(stream)) == text
    assert not [piece for piece in texts(stream) if "\ufffd" in piece]


def test_logprobs_of_impossible_tokens_are_valid_json(service: Service) -> None:
    for body in ({"allowed_token_ids": [5, 6]}, {"logit_bias": {"5": -100}}):
        plain = ask(service, COMPLETIONS, logprobs=20, **body)
        chat = ask(service, CHAT, logprobs=True, top_logprobs=20, **body)
        for reply in (plain, chat):
            assert reply.status_code == 200
            assert strict(reply.text)["choices"][0]["logprobs"]
    assert events(service, CHAT, logprobs=True, top_logprobs=20, allowed_token_ids=[5, 6])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_once_at_the_end_if_asked_for_and_never_otherwise(service: Service, path: str) -> None:
    asked = events(service, path, stream_options={"include_usage": True}, ignore_eos=True)
    assert [event.get("usage") is not None for event in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 4
    assert not [event for event in events(service, path) if event.get("usage")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens", [8192, 9000, 10**9, 10**20, 0, -1])
def test_more_tokens_than_the_context_holds_is_a_clear_400(service: Service, path: str, tokens: int) -> None:
    for stream in (False, True):
        reply = ask(service, path, max_tokens=tokens, stream=stream)
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400
        assert str(tokens) in message
        assert tokens <= 0 or "8192" in message
        assert tokens < 0 or "-" not in message.replace("model's", "")


def test_a_prompt_longer_than_the_context_is_a_400_with_both_numbers(service: Service) -> None:
    reply = ask(service, COMPLETIONS, prompt="word " * 9000)
    assert reply.status_code == 400
    assert "8192" in reply.json()["error"]["message"]


def test_a_null_max_tokens_is_the_default(service: Service) -> None:
    for path in (COMPLETIONS, CHAT):
        assert ask(service, path, max_tokens=None, stop=["e", "a", "o"]).status_code == 200


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    *((CHAT, {"response_format": value}) for value in ("json", {}, {"type": "nope"}, {"type": "json_schema"}, 5)),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}}),
    (CHAT, {"structured_outputs": {"regex": "(("}}),
    *((COMPLETIONS, {"max_tokens": value}) for value in ("x", 1.5, [], {})),
    *((COMPLETIONS, {"temperature": value}) for value in (-1, "hot", [])),
    *((COMPLETIONS, {"prompt": value}) for value in ([], None, {"a": 1}, [["a"]], [10**9], [-1])),
    *((COMPLETIONS, body) for body in ({"n": 0}, {"logprobs": 1000}, {"logit_bias": {"999999": 1}}, {"stop": [""]})),
    *((COMPLETIONS, body) for body in ({"seed": 10**30}, {"top_p": 0}, {"stream": "maybe"}, {"frequency_penalty": 9})),
    *((CHAT, {"messages": value}) for value in ([{}], "x", [{"role": "user", "content": 5}], None)),
    *((CHAT, body) for body in ({"tools": "x"}, {"tool_choice": "required"}, {"chat_template": "{% for %}"})),
)


@pytest.mark.parametrize(("path", "body"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_request_is_a_400_that_is_short_and_shows_nothing_of_the_machine(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    reply = ask(service, path, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 500
    for told in ("site-packages", "Traceback", 'File "', "'input'"):
        assert told not in reply.text


def test_a_route_the_model_does_not_have_is_a_404_in_openai_s_form(service: Service) -> None:
    reply = httpx.post(f"{service.url}/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert reply.status_code == 404
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_counted_and_leaves_no_gauge_up(service: Service, stream: bool) -> None:
    counted = _left(service)
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": MODEL, "prompt": "A long story", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        with httpx.stream("POST", f"{service.url}{COMPLETIONS}", json=body, timeout=2) as reply:
            for _ in reply.iter_lines():
                raise httpx.ReadTimeout("the client has seen enough")
    wait_until(lambda: _left(service) == counted + 1, 20, "the client's leaving is counted")
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "voltserve_requests_in_flight"):
        wait_until(lambda gauge=gauge: service.metric(gauge) == 0, 20, f"{gauge} is 0")  # type: ignore[misc]


def _left(service: Service) -> float:
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("voltserve_client_disconnects_total{"))


def test_a_busy_engine_stays_healthy(service: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, service, COMPLETIONS, prompt="word " * 800, max_tokens=16) for _ in range(8)]
        seen = set()
        while not all(job.done() for job in jobs):
            seen.add((service.health() or (0, {}))[0])
            concurrent.futures.wait(jobs, timeout=0.2)
    assert seen == {200}
    assert {job.result().status_code for job in jobs} == {200}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {**STORY, "logprobs": 1}, 200),
        (CHAT, {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}, 200),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, 200),
        (COMPLETIONS, {"prompt": 5}, 400),
        (CHAT, {"messages": "Hi"}, 400),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_none"}, 404),
        ("/v1/embeddings", {"input": "Hi"}, 404),
    ],
)
def test_answers_are_those_of_the_openapi_document(
    service: Service, path: str, body: dict[str, Any], status: int
) -> None:
    document = httpx.get(f"{service.url}/openapi.json").json()
    reply = httpx.post(f"{service.url}{path}", json={"model": MODEL, **body}, timeout=120)
    assert reply.status_code == status, reply.text
    answer = document["paths"][path]["post"]["responses"][str(status)]
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rsplit("/", 1)[1]]
    schema = answer["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    validator.validate(strict(reply.text))
