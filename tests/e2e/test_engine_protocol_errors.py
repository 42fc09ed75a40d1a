"""What the real engine says of requests that are wrong: which status, which field, in which words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .conftest import MODEL, Service
from .test_engine_protocol import CHAT, COMPLETIONS, HELLO, ask, events, texts

pytestmark = pytest.mark.e2e

RESPONSES = "/v1/responses"
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    CHAT: {"messages": HELLO, "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Requests with something at each depth, to be spoilt member by member.
DEEP: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        CHAT,
        {
            **VALID[CHAT],
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "i", "content": "ok"},
            ],
            "stop": ["a"],
            "logit_bias": {"5": 1},
        },
    ),
    (CHAT, {**VALID[CHAT], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    (COMPLETIONS, {**VALID[COMPLETIONS], "prompt": ["a", "b"], "bad_words": ["x"]}),
    (
        RESPONSES,
        {
            **VALID[RESPONSES],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "ok"},
            ],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
        },
    ),
)
BAD: tuple[Any, ...] = (True, "x", -1, 1.5, 10**20, [], {}, [[]], {"a": [5]}, [None], [{}])
ERROR_TYPES = {"invalid_request_error", "not_found_error"}


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return client.post(path, json={"model": MODEL, **body}, timeout=60)


def check(reply: httpx.Response, field: str, about: str) -> None:
    """An answer, or an error that names the field."""
    if reply.status_code == 200 and '"error":' not in reply.text:
        return
    assert reply.status_code in (400, 404), f"{about}: {reply.status_code} {reply.text}"
    error = reply.json()["error"]
    assert error["type"] in ERROR_TYPES, about
    assert error["code"].replace("_", "").isalpha(), about
    assert 0 < len(error["message"]) <= 500, about
    if field != "n" or error["code"] != "too_many_sequences":  # which the gateway says
        assert str(error["param"]).partition(".")[0] in (field, "tool_choice"), f"{about}: {error}"


@pytest.mark.parametrize("path", VALID)
def test_no_value_of_any_field_is_a_500_and_each_refusal_names_it(service: Service, path: str) -> None:
    document = httpx.get(f"{service.url}/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    documented = document["components"]["schemas"][schema.rsplit("/", 1)[1]]["properties"]
    names = {*documented, *UNDOCUMENTED} - {"model"}
    with httpx.Client(base_url=service.url) as client:
        for name in sorted(names):
            for value in BAD:
                for stream in (False, True) if value in (-1, {}) and name != "stream" else (False,):
                    body = {**VALID[path], "stream": stream, name: value}
                    check(post(client, path, body), name, f"{name}={json.dumps(value)} stream={stream}")


UNDOCUMENTED = re.findall(
    r"\w+",
    """
    top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens allowed_token_ids prompt_logprobs bad_words truncate_prompt_tokens structured_outputs
    priority request_id return_token_ids cache_salt kv_transfer_params vllm_xargs repetition_detection
    response_format chat_template chat_template_kwargs documents use_beam_search thinking_token_budget
    reasoning_effort suffix best_of metadata include background max_tool_calls reasoning truncation user store
    nothing_known
    """,
)


def paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield from paths(member, (*at, name))


def spoilt(body: dict[str, Any], at: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The body with another value at a path; without one for `...`."""
    body = copy.deepcopy(body)
    inner: Any = body
    for part in at[:-1]:
        inner = inner[part]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return body


@pytest.mark.parametrize(("path", "body"), DEEP, ids=range(len(DEEP)))
def test_no_value_at_any_depth_is_a_500_and_each_refusal_names_the_field(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    with httpx.Client(base_url=service.url) as client:
        assert post(client, path, body).status_code == 200
        for at in paths(body):
            for value in (..., None, *BAD) if len(at) > 1 else ():
                check(post(client, path, spoilt(body, at, value)), str(at[0]), f"{at}={value}")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {"top_k": 10**20}, "top_k", "invalid_value"),
        (COMPLETIONS, {"stop_token_ids": [10**30]}, "stop_token_ids.0", "invalid_value"),
        (CHAT, {"structured_outputs": 5}, "structured_outputs", "invalid_type"),
        (COMPLETIONS, {"temperature": -1}, "temperature", "invalid_value"),
        (COMPLETIONS, {"max_tokens": 9000}, "max_tokens", "context_length_exceeded"),
        (CHAT, {"max_tokens": 8192}, "max_tokens", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "word " * 9000}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_type"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
            "messages.0.content.0.type",
            "unsupported_value",
        ),
        (CHAT, {"structured_outputs": {"regex": "(("}}, "structured_outputs.regex", "invalid_value"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format",
            "invalid_value",
        ),
        (COMPLETIONS, {"best_of": 3}, "best_of", "unsupported_value"),
        (CHAT, {"web_search_options": {"a": 1}}, "web_search_options", "unsupported_value"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_value"),
        (RESPONSES, {"input": [], "max_tokens": None}, "input", "invalid_type"),
        (RESPONSES, {"input": "Hi", "temperature": -1, "max_tokens": None}, "temperature", "invalid_value"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_refusal_is_a_400_with_the_field_s_path_streamed_or_not(
    service: Service, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    for stream in (False, True):
        reply = ask(service, path, stream=stream, **body)
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        for hidden in ("validation error", "See stack trace", "out of range", "site-packages", "models/"):
            assert hidden not in error["message"]


def test_openai_s_client_gets_the_field_and_the_code(service: Service) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=[], stream=stream)
        assert (refused.value.param, refused.value.code, refused.value.type) == (
            *("messages", "invalid_value"),
            "invalid_request_error",
        )
    with pytest.raises(openai.NotFoundError, match="cannot embed"):
        client.embeddings.create(model=MODEL, input="x")


def test_what_means_nothing_here_is_told_and_harms_nothing(service: Service) -> None:
    quiet = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    for path in (COMPLETIONS, CHAT):
        assert "x-voltserve-ignored" not in ask(service, path, **quiet).headers
        reply = ask(service, path, **quiet, new_field=1, other=None)
        assert (reply.status_code, reply.headers["x-voltserve-ignored"]) == (200, "new_field")


def test_null_is_the_default_of_every_field(service: Service) -> None:
    document = httpx.get(f"{service.url}/openapi.json").json()["components"]["schemas"]
    for path, schema in ((COMPLETIONS, "CompletionRequest"), (CHAT, "ChatRequest"), (RESPONSES, "ResponseRequest")):
        nulls = dict.fromkeys(document[schema]["properties"])
        reply = httpx.post(f"{service.url}{path}", json={**nulls, "model": MODEL, **VALID[path]}, timeout=120)
        assert reply.status_code == 200, reply.text


def test_a_refusal_writes_one_line_without_the_prompt(service: Service) -> None:
    for stream in (False, True):
        before = len(service.log.read_bytes())
        for body in ({"temperature": -1}, {"structured_outputs": {"regex": "(("}}, {"max_tokens": "x"}):
            assert ask(service, COMPLETIONS, prompt="a secret", stream=stream, **body).status_code == 400
        lines = service.log.read_bytes()[before:].decode().splitlines()
        mine = [line for line in lines if "Engine 000" not in line]
        assert len(mine) == 3, "\n".join(mine)
        assert "secret" not in "\n".join(mine)


def test_a_prompt_that_ends_inside_a_character_is_not_returned(service: Service) -> None:
    body = {"prompt": [504, 224], "temperature": 0, "max_tokens": 6, "logprobs": 0}  # "The", and a byte
    plain = ask(service, COMPLETIONS, **body).json()["choices"][0]
    echoed = ask(service, COMPLETIONS, echo=True, **body).json()["choices"][0]
    assert "The" not in plain["text"]
    assert echoed["text"] == "The\ufffd" + plain["text"]
    for choice in (plain, echoed):
        logprobs = choice["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"].startswith(token, offset)
    for echo in (False, True):
        stream = events(service, COMPLETIONS, echo=echo, **body)
        whole = echoed if echo else plain
        assert "".join(texts(stream)) == whole["text"]
        offsets = [offset for event in stream for offset in event["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"]


def test_no_token_is_counted_where_none_was_asked_for(service: Service) -> None:
    body = {"prompt": [504, 504], "echo": True, "max_tokens": 0}
    usage = ask(service, COMPLETIONS, **body).json()["usage"]
    streamed = events(service, COMPLETIONS, stream_options={"include_usage": True}, **body)[-1]["usage"]
    for counted in (usage, streamed):
        assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (2, 0, 2)


FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema", "name": "x", "schema": {**SCHEMA, "additionalProperties": False}, "strict": True},
    {"type": "json_object"},
    {"type": "text"},
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form["type"])
@pytest.mark.parametrize("limit", [200, 3])
def test_a_response_s_stream_ends_as_the_whole_response(service: Service, form: dict[str, Any], limit: int) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    body: Any = {"model": MODEL, "input": "Hi", "max_output_tokens": limit, "temperature": 0, "text": {"format": form}}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    # A model as small as this can go on with white space for ever.
    assert whole.status == ("incomplete" if limit == 3 else whole.status)
    assert deltas == whole.output_text
    assert whole.text is not None
    assert whole.text.format is not None
    assert whole.text.format.type == form["type"]
    if form["type"] != "text":
        assert whole.output_text.startswith("{")
        if whole.status == "completed":
            assert isinstance(json.loads(whole.output_text), dict)
    last = _events(service, RESPONSES, {k: v for k, v in body.items() if k != "model"})[-1]
    assert last["type"] == f"response.{whole.status}"
    assert last["response"]["status"] == whole.status


def _events(service: Service, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = httpx.post(f"{service.url}{path}", json={"model": MODEL, "stream": True, **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    lines = [line for event in reply.text.split("\n\n") for line in event.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_an_earlier_answer_comes_back_as_openai_s_client_gave_it(service: Service) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    first = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4)
    for content in ("Hello", [{"type": "output_text", "text": "Hello"}]):
        history: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        history += [*first.output, {"role": "user", "content": "Bye"}]
        again = client.responses.create(model=MODEL, input=history, max_output_tokens=4)
        assert again.usage is not None
        assert again.usage.output_tokens > 0
