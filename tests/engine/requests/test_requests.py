"""What is checked and corrected of a request, and of an answer, without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from engine.requests import chat, completions, fields, messages, prompt_ends, responses, tools
from engine.requests.errors import RequestError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_k": 10**20}, "top_k"),
        ({"seed": -(10**20)}, "seed"),
        ({"stop_token_ids": [5, 10**30]}, "stop_token_ids.1"),
        ({"temperature": float("inf")}, "temperature"),
        ({"a": {"b": [{"c": float("nan")}]}}, "a.b.0.c"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"max_tokens": -(10**30)}, "max_tokens"),
        ({"model": ""}, "model"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5.0": 1}}, "logit_bias"),
        ({"logit_bias": {str(10**20): 1}}, "logit_bias"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"length_penalty": -51}, "length_penalty"),
        ({"chat_template_kwargs": {"messages": 5}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversation": "x"}}, "chat_template_kwargs"),
    ],
)
def test_values_that_no_field_can_have_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        fields.check(COMPLETIONS, body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [0, 2**63 - 1], "best_of": 1},
        {"best_of": 3, "n": 3},
        {"tools": [{"schema": {"maximum": 2**64 - 1}}]},
        {"seed": -(2**63), "prompt": "héllo 🙂"},
        {"model": "m", "logit_bias": {"5": 1, "49151": -1}, "length_penalty": -50.0},
        {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": None, "length_penalty": None},
    ],
)
def test_values_at_the_limits_are_taken(body: dict[str, Any]) -> None:
    fields.check(COMPLETIONS, body)


@pytest.mark.parametrize(
    "body",
    [
        {"functions": [{}]},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {"a": 1}},
    ],
)
def test_what_would_change_a_chat_s_answer_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        fields.check(CHAT, body)
    assert refused.value.param == next(iter(body))
    assert refused.value.code == "unsupported_value"


def test_fields_without_a_meaning_are_named_where_a_header_can_name_them() -> None:
    body = {"prompt": "x", "user": "me", "metadata": {}, "store": True, "foo": 1, "bar": None, "a\r\nb": 1}
    assert fields.ignored(body, ["prompt"], COMPLETIONS) == "foo, ..."
    assert fields.ignored({"prompt": "x", "best_of": 1}, ["prompt"], COMPLETIONS) == ""
    many = fields.ignored({f"f{n}": 1 for n in range(1000)}, [], COMPLETIONS)
    assert many.endswith("...")
    assert len(many) < 200


def test_a_function_without_parameters_takes_none_and_others_take_an_object() -> None:
    bare: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [], "tools": [bare, {"type": "function", "function": {"name": "g", "parameters": {}}}]}
    tools.prepare_chat(body)
    first, second = (tool["function"]["parameters"] for tool in body["tools"])
    assert first == {"type": "object", "properties": {}, "const": {}}
    assert second == {"type": "object", "properties": {}}
    kept = {"anyOf": [{"type": "object"}]}
    assert tools._parameters(kept) is kept


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
)
def test_wrong_tools_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        tools.prepare_chat(body)
    assert refused.value.param == param


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "null", [1], 5])
def test_arguments_in_the_history_are_an_object_s_json(arguments: Any) -> None:
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as refused:
        messages.check([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])
    assert refused.value.param == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("kind", ["file", [], {}, 5, None])
def test_parts_of_other_types_are_refused(kind: Any) -> None:
    with pytest.raises(RequestError) as refused:
        messages.check([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}])
    assert refused.value.param == "messages.0.content.1.type"


@pytest.mark.parametrize("content", [[{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "ab"])
def test_an_earlier_answer_is_taken_as_clients_send_it_back(content: Any) -> None:
    body = {"input": [{"type": "message", "role": "assistant", "content": content}, {"role": "user", "content": "x"}]}
    responses.prepare(body)
    assert body["input"][0] == {"role": "assistant", "content": "ab"}


def test_formats_reach_vllm_where_it_heeds_them() -> None:
    schema = {"type": "object"}
    for form, expected in (
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "name": "x", "schema": schema}, {"json": schema}),
    ):
        body: dict[str, Any] = {"input": "x", "text": {"format": form}}
        responses.prepare(body)
        assert responses.without_format(body) == {"input": "x", "structured_outputs": expected}
        assert responses.correct({"text": None}, body)["text"] == {"format": form}


def test_a_whole_response_s_stream_is_one_that_openai_s_client_knows() -> None:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }
    text = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": None}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    answer = {
        **{"id": "r", "object": "response", "created_at": 1, "model": "m", "tools": [], "tool_choice": "auto"},
        **{"parallel_tool_calls": True, "output": [message, call], "status": "incomplete", "usage": None},
        "incomplete_details": {"reason": "max_output_tokens"},
    }
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    data = [json.loads(event.split("\ndata: ")[1]) for event in responses.events(answer)]
    kinds = [known.validate_python(event).type for event in data]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    assert kinds == [f"response.{kind}" for kind in (
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "incomplete"),
    )]  # fmt: skip


def test_a_whole_chat_s_stream_says_the_same_once() -> None:
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choices = [
        {
            **{"index": n, "message": {"role": "assistant", "content": None, "tool_calls": [call, call]}},
            **{"logprobs": None, "finish_reason": "tool_calls", "stop_reason": None},
        }
        for n in range(2)
    ]
    answer = {"id": "a", "created": 1, "model": "m", "choices": choices, "usage": {"total_tokens": 5, "x": None}}
    events = [json.loads(event) for event in chat.events(answer, include_usage=True)]
    told = [choice for event in events for choice in event["choices"]]
    assert [[x["index"] for x in c["delta"].get("tool_calls", [])] for c in told] == [[0, 1], [], [0, 1], []]
    assert [c["finish_reason"] for c in told] == [None, "tool_calls"] * 2
    assert [event["usage"] for event in events if "usage" in event] == [{"total_tokens": 5}]


@pytest.mark.parametrize(
    ("tokens", "text", "offsets", "end"),
    [
        (["Hi", " you"], "Hi you", [0, 2], 6),
        (["The", "", ","], "The�,", [0, 3, 4], 5),  # half of a character in the prompt
        (["a", "<|end|>", "b"], "ab", [0, 1, 1], 2),  # a special token that the text does not show
    ],
)
def test_offsets_are_those_in_the_text(tokens: list[str], text: str, offsets: list[int], end: int) -> None:
    assert completions.text_offsets(tokens, text, 0, whole=True) == (offsets, end)
    assert completions.text_offsets(tokens, text, 10, whole=True) == ([10 + offset for offset in offsets], 10 + end)


def test_offsets_in_a_stream_are_ahead_of_text_that_is_held_back() -> None:
    assert completions.text_offsets(["a", " EN"], "a", 5, whole=False) == ([5, 6], 9)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file("models/smollm2-nvfp4/tokenizer.json")


@pytest.mark.parametrize("text", ["", "The", "naïve", "你好", "🙂"])
@pytest.mark.parametrize("unfinished", ["ꙮ", "你", "🚀"])
def test_a_prompt_counts_up_to_its_last_whole_character(tokenizer: Tokenizer, text: str, unfinished: str) -> None:
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert prompt_ends.whole_characters(tokenizer, whole) == whole
    spelled = tokenizer.encode(unfinished, add_special_tokens=False).ids
    assert len(spelled) > 1
    for cut in range(1, len(spelled)):
        assert prompt_ends.whole_characters(tokenizer, whole + spelled[:cut]) == whole


def test_a_prompt_of_nothing_but_strange_bytes_leaves_none_to_go_on_from(tokenizer: Tokenizer) -> None:
    assert prompt_ends.whole_characters(tokenizer, [224]) == []
    assert prompt_ends.whole_characters(tokenizer, [224] * 9) == []
    assert prompt_ends.whole_characters(tokenizer, []) == []
    assert prompt_ends.whole_characters(tokenizer, None) is None
