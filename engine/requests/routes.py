"""The engine's routes: checks of the request, then vLLM's handler, then corrections of the answer.

They precede vLLM's own routes of the same paths. A stream's head is sent only after the engine has accepted the
request. So a refusal is a 400, streamed or not.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.engine.protocol import ErrorResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from engine.requests import chat, completions, fields, messages, responses, tools
from engine.requests.errors import RequestError, cannot, of_answer, of_exception, of_problems

CLIENT_CLOSED = 499
Body = dict[str, Any]
Answer = JSONResponse | AsyncIterator[str]

# Whether the answer's status can still become 400. Then vLLM need not log the client's error.
before_head: ContextVar[bool] = ContextVar("before_head", default=False)


@dataclass(frozen=True)
class Endpoint:
    """One route.

    Attributes:
        path: of the URL.
        model: vLLM's model of a request.
        serving: the attribute of the application's state with vLLM's handler, which is None if the model has no such
            route.
        prepare: checks the parsed body and completes it.
        answer: calls the handler and corrects its answer.
        held: how many events a stream begins with even if the engine refuses the request.
    """

    path: str
    model: Any
    serving: str
    prepare: Callable[[Body], None]
    answer: Callable[[Any, Any, Body, Request], Awaitable[Answer]]
    held: Callable[[Any], int]


def routes() -> list[Route]:
    """All routes, for a Starlette application."""
    return [Route(endpoint.path, _handler(endpoint), methods=["POST"]) for endpoint in ENDPOINTS]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    @with_cancellation  # type: ignore[untyped-decorator]
    @load_aware_call  # type: ignore[untyped-decorator]
    async def answer(request: Any, raw_request: Request) -> Response:
        body, parsed, serving = request
        before_head.set(True)  # in this task's context; a stream's later events run in another task
        made = await endpoint.answer(serving, parsed, body, raw_request)
        if isinstance(made, JSONResponse):
            return made
        begin = await _begin(made, endpoint.held(parsed), body)
        return StreamingResponse(_rest(begin, made, body), media_type="text/event-stream")

    async def handle(raw_request: Request) -> Response:
        body: Body = {}
        try:
            body = _parse(await raw_request.body())
            serving = _serving(raw_request, endpoint)
            ignored = fields.ignored(body, endpoint.model.model_fields, endpoint.path)
            fields.check(endpoint.path, body)
            endpoint.prepare(body)
            parsed = _validate(endpoint.model, body)
            response: Response | None = await answer((body, parsed, serving), raw_request)
        except (EngineDeadError, EngineGenerateError):
            raise  # vLLM's handler for these ends the server
        except Exception as error:
            return of_exception(error, body).response()
        if response is None:
            return Response(status_code=CLIENT_CLOSED)
        if ignored:
            response.headers[fields.IGNORED_HEADER] = ignored
        return response

    return handle


def _serving(raw_request: Request, endpoint: Endpoint) -> Any:
    serving = getattr(raw_request.app.state, endpoint.serving, None)
    if serving is None:
        raise cannot(endpoint.path)
    return serving


def _parse(raw: bytes) -> Body:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise RequestError("the body is no JSON text", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body: expected a JSON object", code="invalid_type")
    return {name: value for name, value in body.items() if value is not None}  # null means "the default" to OpenAI


def _validate(model: Any, body: Body) -> Any:
    """vLLM's model of the body. Raises RequestError, which names the invalid field if there is one."""
    given = responses.without_format(body) if model is ResponsesRequest else dict(body)
    try:
        parsed = model.model_validate(given)
    except ValidationError as error:
        problem = of_problems(error.errors(), body)
        if problem.param is None:  # vLLM reads some fields before their types are checked
            _check_types(model, body)
        raise problem from None
    except VLLMClientError as error:  # of vLLM's own validators
        raise of_exception(error, body) from None
    except Exception as error:  # vLLM's validators read values before their types are checked
        _check_types(model, body)
        raise RequestError("the body is not valid") from error
    for name in ("messages", "input"):
        if isinstance(items := getattr(parsed, name, None), list):
            messages.settle(items, name, body)
    return parsed


def _check_types(model: Any, body: Body) -> None:
    """Each field by itself, at last without taking "1" for 1. Raises RequestError for the first that is wrong."""
    for strict in (False, True):
        for name, field in model.model_fields.items():
            if name in body:
                try:
                    TypeAdapter(field.annotation).validate_python(body[name], strict=strict)
                except ValidationError as error:
                    raise of_problems(error.errors(), body[name], (name,)) from None


async def _begin(stream: AsyncIterator[str], held: int, body: Body) -> list[str]:
    """The first events, up to the one that shows that the engine accepted the request. Raises RequestError."""
    events = []
    async for event in stream:
        if (error := _stream_error(event, body)) is not None:
            raise error
        events.append(event)
        if len(events) > held:
            break
    return events


async def _rest(begin: Iterable[str], stream: AsyncIterator[str], body: Body) -> AsyncIterator[str]:
    for event in begin:
        yield event
    try:
        async for event in stream:
            error = _stream_error(event, body)
            yield event if error is None else f"data: {error.event()}\n\n"
    except Exception as error:  # the status 200 is sent, so an event must carry the error
        yield f"data: {of_exception(error, body).event()}\n\n"


def _stream_error(event: str, body: Body) -> RequestError | None:
    """The error that vLLM sent as an event of a stream, or None."""
    if not event.startswith('data: {"error"'):
        return None
    return of_answer(ErrorResponse.model_validate_json(event.removeprefix("data: ")).error, body)


def _refused(made: Any, body: Body) -> Any:
    """The answer of vLLM's handler. Raises RequestError if it is an error."""
    if isinstance(made, ErrorResponse):
        raise of_answer(made.error, body)
    return made


async def _complete(serving: Any, request: Any, body: Body, raw_request: Request) -> Answer:
    made = _refused(await serving.create_completion(request, raw_request), body)
    positions: dict[int, int] = {}
    if not request.stream:
        answer = made.model_dump()
        completions.correct(answer, request, positions)
        return JSONResponse(answer)
    if request.logprobs is None and not request.echo:
        stream: AsyncIterator[str] = made
        return stream
    return _corrected(made, request, positions)


async def _corrected(stream: AsyncIterator[str], request: Any, positions: dict[int, int]) -> AsyncIterator[str]:
    async for event in stream:
        if event.startswith('data: {"id"'):
            answer = json.loads(event.removeprefix("data: "))
            completions.correct(answer, request, positions)
            yield f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"
        else:
            yield event


async def _chat(serving: Any, request: Any, body: Body, raw_request: Request) -> Answer:
    whole = not request.stream or chat.needs_whole(request)
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    if whole and request.stream:
        streamed, request.stream, request.stream_options = True, False, None
    else:
        streamed = False
    made = _refused(await serving.create_chat_completion(request, raw_request), body)
    if not whole:
        stream: AsyncIterator[str] = made
        return stream
    answer = made.model_dump()
    return _as_stream(chat.events(answer, include_usage)) if streamed else JSONResponse(answer)


async def _as_stream(events: Iterable[str]) -> AsyncIterator[str]:
    for event in events:
        yield f"data: {event}\n\n"
    yield "data: [DONE]\n\n"


async def _respond(serving: Any, request: Any, body: Body, raw_request: Request) -> Answer:
    responses.check_offered(request, serving)
    whole = not request.stream or (responses.needs_whole(request) and not request.background)
    streamed = request.stream
    request.stream = not whole
    made = _refused(await serving.create_responses(request, raw_request), body)
    if not whole:
        return _response_events(made, body)
    answer = responses.correct(made.model_dump(mode="json", by_alias=True), body)
    return _each(responses.events(answer)) if streamed else JSONResponse(answer)


async def _each(events: Iterable[str]) -> AsyncIterator[str]:
    for event in events:
        yield event


async def _response_events(stream: AsyncIterator[Any], body: Mapping[str, Any]) -> AsyncIterator[str]:
    async for event in stream:
        yield responses.sse(event, body)


def _prepare_chat(body: Body) -> None:
    messages.check(body.get("messages"))
    tools.prepare_chat(body)


def _prepare_response(body: Body) -> None:
    tools.prepare_responses(body)
    responses.prepare(body)


def _prepare_completion(body: Body) -> None:
    if "prompt_embeds" not in body and body.get("prompt", "") in ("", []):
        raise RequestError("prompt: expected a text or tokens, got none", "prompt", "missing_required_parameter")


ENDPOINTS = (
    Endpoint(
        "/v1/completions", CompletionRequest, "openai_serving_completion", _prepare_completion, _complete, lambda _: 0
    ),
    Endpoint(
        "/v1/chat/completions",
        ChatCompletionRequest,
        "openai_serving_chat",
        _prepare_chat,
        _chat,
        lambda request: request.n or 1,  # per choice, an event with the role
    ),
    Endpoint(
        "/v1/responses",
        ResponsesRequest,
        "openai_serving_responses",
        _prepare_response,
        _respond,
        lambda _: 2,  # created, in progress
    ),
)
