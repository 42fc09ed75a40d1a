"""The mended errors; their texts are the real engine's, seen on vLLM 0.19.1."""

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from server.gateway.mend import MAX_MESSAGE, SILENT, error_body, message_text, request_body
from tests.server.gateway.inprocess import InProcess, error_of

TRACE = '\n\n  File "/srv/x/site-packages/vllm/entrypoints/utils.py", line 34, in create_completion\n    POST /v1 [{}]'
INT = "{'type': 'int_parsing', 'loc': ('body', 'max_tokens'), 'msg': 'Input should be a valid integer', 'input': 'x'}"
UNION = (
    "{'type': 'literal_error', 'loc': ('body', 'response_format', 'function-wrap[__log_extra_fields__()]', 'type'), "
    "'msg': \"Input should be 'text', 'json_object' or 'json_schema'\", 'input': 'nope'}"
)
ITEM = (
    "{'type': 'missing', 'loc': ('body', 'messages', 0, 'ChatParam', 'content'), 'msg': 'Field required', 'input': {}}"
)
WHOLE = (
    "{'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, `logprobs` must be positive.', "
    "'input': {'prompt': 'a secret'}}"
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"1 validation error:\n  {INT}{TRACE}", "max_tokens: Input should be a valid integer"),
        (
            f"2 validation errors:\n  {UNION}\n  {UNION}",
            "response_format.type: Input should be 'text', 'json_object' or 'json_schema'",
        ),
        (f"1 validation error:\n  {ITEM}", "messages.0.content: Field required"),
        (f"1 validation error:\n  {WHOLE}{TRACE}", "`logprobs` must be positive."),
        (
            f"2 validation errors:\n  {INT}\n  {WHOLE}",
            "max_tokens: Input should be a valid integer; `logprobs` must be positive.",
        ),
        (
            "max_tokens=9000cannot be greater than max_model_len=max_total_tokens=8192. Please request fewer.",
            "max_tokens=9000 cannot be greater than max_model_len=max_total_tokens=8192. Please request fewer.",
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 8192 output tokens and your "
            "prompt contains 2 characters (more than 0 characters, which is the upper bound for 0 input tokens).",
            "max_tokens=8192 leaves no room for a prompt in this model's context of 8192 tokens",
        ),
        ("The model `x` does not exist.", "The model `x` does not exist."),
    ],
)
def test_messages_say_what_is_wrong_and_nothing_else(message: str, expected: str) -> None:
    assert message_text(message) == expected


def test_a_prompt_that_is_too_long_keeps_its_numbers() -> None:
    message = (
        "This model's maximum context length is 8192 tokens. However, you requested 4 output tokens and your prompt …"
    )
    assert message_text(message) == message


def test_long_messages_are_cut() -> None:
    assert len(message_text("x" * 10_000)) == MAX_MESSAGE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": {"message": "", "type": "InternalServerError", "param": null, "code": 500}}', SILENT),
        (b'{"error": {"message": null}}', SILENT),
        (b'{"error": "short"}', SILENT),
        (b"Internal Server Error", SILENT),
        (b"[1]", SILENT),
        (b"", SILENT),
    ],
)
def test_every_error_is_in_openai_s_form(body: bytes, message: str) -> None:
    error = json.loads(error_body(500, body))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == message


def test_what_the_engine_says_of_type_param_and_code_is_kept() -> None:
    given = {"message": "m", "type": "BadRequestError", "param": "n", "code": 400}
    assert json.loads(error_body(400, json.dumps({"error": given}).encode()))["error"] == given


def test_only_a_null_max_tokens_of_completions_changes_a_body() -> None:
    body = b'{"prompt": "\xe5\xad\x97",  "max_tokens": null}'
    request = json.loads(body)
    assert json.loads(request_body("/v1/completions", request, body)) == {"prompt": "字"}
    assert request_body("/v1/chat/completions", request, body) is body
    for other in ({"max_tokens": 1}, {}, {"max_completion_tokens": None}):
        assert request_body("/v1/completions", other, body) is body


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"detail": "Not Found"}, 404),
        PlainTextResponse("Internal Server Error", 500),
        JSONResponse({"error": {"message": f"1 validation error:\n  {INT}{TRACE}"}}, 400),
    ],
)
async def test_errors_arrive_mended_with_the_engine_s_status(answer: Response) -> None:
    here = InProcess()
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    here.pool.upstreams[0].client._transport = httpx.ASGITransport(app)
    reply = await here.ask()
    assert reply.status_code == answer.status_code
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert "site-packages" not in error_of(reply)["message"]


async def test_a_null_max_tokens_reaches_the_engine_as_none_at_all() -> None:
    bodies: list[Any] = []

    async def take(request: Any) -> Response:
        bodies.append(await request.json())
        return JSONResponse({})

    here = InProcess()
    app = Starlette(routes=[Route("/v1/completions", take, methods=["POST"])])
    here.pool.upstreams[0].client._transport = httpx.ASGITransport(app)
    assert (await here.ask(max_tokens=None)).status_code == 200
    assert bodies == [{"model": "m", "prompt": "Hi"}]
