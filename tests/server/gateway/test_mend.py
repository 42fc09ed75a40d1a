"""The mended errors; their texts are the real engine's, seen on vLLM 0.19.1."""

import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from server.gateway.mend import MAX_MESSAGE, SILENT, error_body, message_text
from tests.server.gateway.inprocess import InProcess, error_of

TRACE = '\n\n  File "/srv/x/site-packages/vllm/entrypoints/utils.py", line 34, in create_completion\n    POST /v1 [{}]'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"Not so.{TRACE}", "Not so."),
        (
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "EngineCore encountered an issue.",
        ),
        ("See stack trace (above) for the root cause.", SILENT),
        ("The model `x` does not exist.", "The model `x` does not exist."),
    ],
)
def test_messages_say_nothing_of_the_machine(message: str, expected: str) -> None:
    assert message_text(message) == expected


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
    given = {"message": "m", "type": "invalid_request_error", "param": "n", "code": "invalid_type"}
    assert json.loads(error_body(400, json.dumps({"error": given}).encode()))["error"] == given


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "invalid_value"),
        (404, "not_found_error", "not_found"),
        (500, "server_error", "engine_error"),
        (503, "service_unavailable_error", "engine_error"),
    ],
)
@pytest.mark.parametrize("number", [400, "400", None])
def test_words_stand_for_what_vllm_says_in_its_own(status: int, kind: str, code: str, number: object) -> None:
    given = {"message": "m", "type": "BadRequestError", "param": 5, "code": number}
    error = json.loads(error_body(status, json.dumps({"error": given}).encode()))["error"]
    assert error == {"message": "m", "type": kind, "param": None, "code": code}


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"detail": "Not Found"}, 404),
        PlainTextResponse("Internal Server Error", 500),
        JSONResponse({"error": {"message": f"Not so.{TRACE}"}}, 400),
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
