from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from engine.requests import errors, install, routes

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret"}]}


def raised(error: Exception) -> Exception:
    """The error, with a traceback."""
    with pytest.raises(type(error)):
        raise error
    return error


def problem(**body: Any) -> errors.RequestError:
    """What a client is told of a chat that vLLM's model refuses."""
    with pytest.raises(errors.RequestError) as refused:
        routes._validate(ChatCompletionRequest, {**HI, **body})
    return refused.value


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": "x"}, "max_tokens", 'max_tokens: expected an integer, got "x"'),
        ({"stream_options": 5, "stream": True}, "stream_options", "stream_options: expected an object, got 5"),
        ({"structured_outputs": 5}, "structured_outputs", "structured_outputs: expected an object, got 5"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs", 'prompt_logprobs: expected an integer, got "1"'),
        ({"messages": [5]}, "messages.0", "messages.0: expected an object, got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
            "messages.0.content.0.text",
            "messages.0.content.0.text: expected a string, got an object",
        ),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools.0.function.name",
            "tools.0.function.name: this field is required",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "i"}]}]},
            "messages.0.tool_calls.0.function",
            "messages.0.tool_calls.0.function: this field is required",
        ),
    ],
)
def test_the_first_problem_names_the_field_what_was_expected_and_what_came(
    body: dict[str, Any], param: str, message: str
) -> None:
    error = problem(**body)
    assert (error.param, error.message) == (param, message)


def test_of_a_union_the_member_that_the_client_meant_counts() -> None:
    error = problem(response_format={"type": "json_schema", "json_schema": {"name": 5, "schema": {}}})
    assert error.param == "response_format.json_schema.name"


@pytest.mark.parametrize(
    ("raised", "param", "code"),
    [
        (ValueError("n must be 1 when using greedy sampling, got 2."), "n", "invalid_value"),
        (VLLMValidationError("too many", parameter="logprobs", value=99), "top_logprobs", "invalid_value"),
        (VLLMValidationError("no such token", parameter="stop_token_ids.0"), "stop_token_ids.0", "invalid_value"),
        (ValueError("Grammar error: invalid regex"), "structured_outputs", "invalid_value"),
        (VLLMValidationError("no such schema", parameter="response_format"), "structured_outputs", "invalid_value"),
        (ValueError("prompt cannot be empty"), "prompt", "invalid_value"),
        (ValueError("The decoder prompt cannot be empty"), "prompt", "invalid_value"),
        (ValueError("m is not a multimodal model"), "prompt", "invalid_value"),
        (ValueError("model cannot contain an empty string."), "model", "invalid_value"),
        (NotImplementedError("no"), None, "unsupported_value"),
        (VLLMValidationError("maximum context length is 8 tokens", parameter="input_tokens"), "prompt", None),
    ],
)
def test_what_vllm_raises_names_the_client_s_field(raised: Exception, param: str | None, code: str | None) -> None:
    request = {"model": "m", "prompt": "x", "n": 2, "top_logprobs": 99, "structured_outputs": {}, "stop_token_ids": [1]}
    error = errors.of_exception(raised, request)
    assert (error.status, error.param, error.code) == (400, param, code or "context_length_exceeded")
    assert "parameter=" not in error.message


def test_a_fault_of_ours_is_a_500_whose_text_is_neither_told_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        error = errors.of_exception(raised(KeyError("a secret")), {})
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert error.status == 500
    assert error.body()["error"]["type"] == "server_error"
    assert "secret" not in error.message + caplog.text
    assert "KeyError" in caplog.text
    assert "test_errors.py" in caplog.text


def test_messages_show_no_files_of_this_machine() -> None:
    told = errors.readable(f'cannot read {sys.executable}: see /no/such/route\n\n  File "/x/y.py", line 3')
    assert told == "cannot read …: see /no/such/route"
    checked = "it cannot be followed: [04:34:47] /project/cpp/x.cc:29: Check failed: (e.empty()) is false: Bad JSON"
    assert errors.readable(checked) == "it cannot be followed: Bad JSON"


def test_a_refused_value_is_shown_short() -> None:
    for value in (10**5000, "x" * 1000, [1] * 1000, {"a": 1}, None, True):
        assert 0 < len(errors.shown(value)) <= errors.SHOWN


def record(error: Exception) -> logging.LogRecord:
    info = (type(error), raised(error), error.__traceback__)
    return logging.LogRecord("vllm.x", logging.ERROR, "f", 1, "It failed.", (), info)


def test_a_refusal_before_the_head_is_not_logged_and_a_later_one_without_its_text() -> None:
    token = routes.before_head.set(True)
    try:
        assert not install.is_for_the_log(record(ValueError("a secret")))
    finally:
        routes.before_head.reset(token)
    late = record(ValueError("a secret"))
    assert install.is_for_the_log(late)
    assert logging.Formatter().format(late).startswith("It failed. (ValueError at test_errors.py:")
    ours = record(KeyError("k"))
    assert install.is_for_the_log(ours)
    assert ours.exc_info


def test_pydantic_s_own_view_of_the_request_is_not_told() -> None:
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate({**HI, "n": "many"})
    error = errors.of_exception(refused.value, {**HI, "n": "many"})
    assert error.message == 'n: expected an integer, got "many"'
