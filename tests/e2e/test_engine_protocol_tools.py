"""Tools through the real engine: with a stream and without, whatever the model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .conftest import MODEL, Service, serving
from .test_engine_protocol import CHAT, HELLO, ask, events

pytestmark = pytest.mark.e2e

CITY = {"city": {"type": "string", "enum": ["Paris}", 'R"ome']}}  # with what breaks parsers that count braces
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": CITY, "required": ["city"]}}
WEATHER["parameters"]["additionalProperties"] = False  # type: ignore[index]
TOOL = {"type": "function", "function": WEATHER}
IMPOSSIBLE = {"type": "function", "function": {**WEATHER, "parameters": {"type": "nope"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
# What hermes models write; the model of these tests would not of itself.
ONE_CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Paris"\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("tools") / "log"
    with serving(log, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as started:
        yield started


def client_of(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


def whole(service: Service, **body: Any) -> list[dict[str, Any]]:
    reply = ask(service, CHAT, tools=[TOOL], temperature=0, **body)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return [
        {
            "calls": [call["function"] for call in choice["message"].get("tool_calls", [])],
            "content": choice["message"]["content"] or "",
            "finish_reason": choice["finish_reason"],
        }
        for choice in choices
    ]


def streamed(service: Service, n: int = 1, **body: Any) -> list[dict[str, Any]]:
    """The same, put together of a stream."""
    told: list[dict[str, Any]] = [{"calls": [], "content": "", "finish_reason": None} for _ in range(n)]
    for event in events(service, CHAT, tools=[TOOL], temperature=0, n=n, **body):
        for choice in event["choices"]:
            mine = told[choice["index"]]
            mine["content"] += choice["delta"].get("content") or ""
            assert mine["finish_reason"] is None, "something comes after the reason of the end"
            mine["finish_reason"] = choice["finish_reason"]
            for call in choice["delta"].get("tool_calls") or ():
                assert call["index"] <= len(mine["calls"])
                if call["index"] == len(mine["calls"]):
                    assert call["id"]
                    assert call["type"] == "function"
                    mine["calls"].append({"name": call["function"]["name"], "arguments": ""})
                mine["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
    return told


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_the_same_streamed_and_whole(tooled: Service, choice: Any) -> None:
    # One call, since `required` lets the model go on with others for as long as it likes.
    answer = whole(tooled, tool_choice=choice, max_tokens=100, parallel_tool_calls=False)
    assert answer == streamed(tooled, tool_choice=choice, max_tokens=100, parallel_tool_calls=False)
    for call in answer[0]["calls"]:
        assert call["name"] == "weather"
        assert json.loads(call["arguments"])["city"] in CITY["city"]["enum"]
    assert answer[0]["calls"] or answer[0]["finish_reason"] == "length"


@pytest.mark.parametrize("tokens", range(3, 30, 5))
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_a_call_that_max_tokens_cuts_ends_with_length(tooled: Service, choice: Any, tokens: int) -> None:
    body: dict[str, Any] = {"tool_choice": choice, "max_tokens": tokens}
    if choice == "auto":
        body["structured_outputs"] = {"regex": ONE_CALL}
    reasons = [answer[0]["finish_reason"] for answer in (whole(tooled, **body), streamed(tooled, **body))]
    ended = ask(tooled, CHAT, tools=[TOOL], temperature=0, **body).json()["usage"]["completion_tokens"] < tokens
    assert reasons in ([["length"] * 2] if not ended else [["stop"] * 2, ["tool_calls"] * 2])


def test_a_call_that_the_model_makes_is_the_same_streamed_and_whole(tooled: Service) -> None:
    body: dict[str, Any] = {"structured_outputs": {"regex": ONE_CALL}, "max_tokens": 80}
    answer = whole(tooled, **body)
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert [choice["calls"] for choice in answer] == [[call]]
    assert answer[0]["finish_reason"] == "tool_calls"
    told = streamed(tooled, **body)
    assert (told[0]["calls"], told[0]["finish_reason"]) == ([call], "tool_calls")


@pytest.mark.parametrize(
    "body",
    [{"structured_outputs": {"regex": ONE_CALL}}, {"tool_choice": NAMED}, {"tool_choice": "required"}],
    ids=["auto", "named", "required"],
)
def test_several_choices_each_have_their_own_calls(tooled: Service, body: dict[str, Any]) -> None:
    filled: dict[str, Any] = {"max_tokens": 80, "seed": 1, **body}
    reply = [
        e for e in events(tooled, CHAT, tools=[TOOL], n=3, temperature=0.5, logprobs=True, **filled) if e["choices"]
    ]
    for index in range(3):
        mine = [choice for event in reply for choice in event["choices"] if choice["index"] == index]
        reason = mine[-1]["finish_reason"]
        assert reason in ("stop", "tool_calls", "length")
        calls = [call for choice in mine for call in choice["delta"].get("tool_calls") or ()]
        arguments = "".join(call["function"].get("arguments") or "" for call in calls if call["index"] == 0)
        if reason != "length":
            assert json.loads(arguments)["city"]
        assert any(choice["logprobs"] for choice in mine)


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_without_parameters_gets_an_empty_object(tooled: Service, stream: bool) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    body = {"tools": [bare], "tool_choice": {"type": "function", "function": {"name": "now"}}, "max_tokens": 50}
    if stream:
        told = [choice for event in events(tooled, CHAT, **body) for choice in event["choices"]]
        calls = [call for choice in told for call in choice["delta"].get("tool_calls") or ()]
        assert json.loads("".join(call["function"].get("arguments") or "" for call in calls)) == {}
    else:
        message = ask(tooled, CHAT, **body).json()["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "none_such"}}}, "tool_choice.function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        ({"tools": [IMPOSSIBLE], "tool_choice": NAMED}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_tools_are_a_400_that_names_the_field(
    tooled: Service, body: dict[str, Any], param: str, stream: bool
) -> None:
    reply = ask(tooled, CHAT, stream=stream, **{"tools": [TOOL], "messages": HELLO, **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_a_response_s_forced_call_comes_as_a_stream_that_openai_s_client_reads(tooled: Service, choice: Any) -> None:
    client = client_of(tooled)
    body: Any = {
        **{"model": MODEL, "input": "Weather?", "max_output_tokens": 200, "temperature": 0},
        **{"tools": [{"type": "function", **WEATHER}], "tool_choice": choice},
    }
    answer: Any = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_response()
    calls = [
        [(item.name, item.arguments) for item in a.output if item.type == "function_call"] for a in (answer, final)
    ]
    assert calls[0] == calls[1]
    for _, arguments in calls[0]:
        assert json.loads(arguments)["city"] in CITY["city"]["enum"]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{answer.status}"
    assert answer.text is None or answer.text.format is None or answer.text.format.type == "text"
    assert calls[0] or answer.status == "incomplete"


def test_usage_comes_once_with_tools_too(tooled: Service) -> None:
    for choice in ("required", NAMED, "auto"):
        for n in (1, 2):
            body = {"tools": [TOOL], "tool_choice": choice, "n": n, "stream_options": {"include_usage": True}}
            told = events(tooled, CHAT, temperature=0.5, max_tokens=5, **body)
            assert [event.get("usage") is not None for event in told] == [False] * (len(told) - 1) + [True]
            assert told[-1]["choices"] == []
