"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}. server/static/schemas.yaml lists the words.

`message` names the field, what was expected and what arrived. `param` is the field's dotted path. `type` depends only
on the status. `code` is a word, never a number.
"""

import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from vllm.entrypoints.openai.engine.protocol import GenerationError
from vllm.exceptions import VLLMClientError, VLLMNotFoundError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.logger import init_logger

logger = init_logger("vllm.voltserve.requests")

INVALID = "invalid_value"
IMPOSSIBLE = (
    "no token is possible: what the request asks for (grammar, allowed_token_ids, bad_words, min_tokens) excludes all, "
    "or the model computed no number"
)
TYPES = {400: "invalid_request_error", 404: "not_found_error", 503: "service_unavailable_error"}
MAX_MESSAGE = 500  # characters
SHOWN = 60  # characters of a refused value

# The exceptions that vLLM raises for an invalid request. Its own error handling answers them with 400.
OF_REQUESTS = (VLLMClientError, ValueError, TypeError, OverflowError, NotImplementedError, RecursionError)

_NO_ROOM = re.compile(r"maximum context length is (\d+) tokens\. However, you requested (\d+) output tokens")
_BEYOND = re.compile(r"(\w+)=(\d+) ?cannot be greater than (?:\w+=)+(\d+)")
_TOO_LONG = re.compile(r"maximum context length|longer than the maximum model length|exceeds the max_model_len")
_GRAMMAR = re.compile(r"[Gg]rammar|[Rr]egex|[Ss]chema|Choice")
_GRAMMARS = ("structured_outputs", "response_format", "text", "tools")  # the fields that have one
_OF_PROMPTS = re.compile(r"prompt cannot be empty|not (?:a )?multimodal")
_TOOL_CHOICE = re.compile(r"tool[ _]choice")
_REPETITION = re.compile(r"\b(?:min_count|(?:min|max)_pattern_size)\b")
_PROMPTS = ("messages", "prompt", "input")
BUDGETS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# The engine's name of a field: the clients' names of it. The first one in the request counts.
_NAMES = {
    "logprobs": ("top_logprobs", "logprobs"),
    "max_tokens": BUDGETS,
    "input_tokens": _PROMPTS,
    "response_id": ("previous_response_id",),
    "response_format": _GRAMMARS,
}
_MUST_BE = re.compile(r"^`(\w+)` must be (an? (?:integer|number|string|boolean|object|array))\.$")
_QUOTED = re.compile(r"[`'\"]([a-z_]+)[`'\"]")
_WORD = re.compile(r"\b([a-z_]+)\b")
_PLAIN = frozenset({"model", "input", "text", "user", "stop", "store", "echo"})  # also words of prose
_SUBJECT = re.compile(r"\b([a-z_]+) (?:must|should|is|are|cannot|can|contains?|has|of)\b")
_FILES = re.compile(r"(?<![\w/:.])/(?:[\w.+~-]+/)+[\w.+~-]*")
# Where and what xgrammar checked: "[12:34:56] /project/cpp/x.cc:12: Check failed: (ok) is false: ".
_CHECK = re.compile(r"\[[\d:]+\] \S+\.(?:cc|h):\d+: (?:Check failed: \(.*?\) is false: )?")
_WORDS = (
    (re.compile(r"^(?:Input should be|Value error,|Assertion failed,)\s*"), ""),
    (re.compile(r" or (?:an )?instance of \w+"), ""),
    (re.compile(r", unable to parse .*"), ""),
    (re.compile(r"\ba (?:valid )?dictionary"), "an object"),
    (re.compile(r"\ba (?:valid )?list"), "an array"),
    (re.compile(r"^iterable"), "an array"),
    (re.compile(r"\ba valid integer"), "an integer"),
    (re.compile(r"\bvalid (?=string|integer|number|boolean)"), ""),
)


class RequestError(Exception):
    """An answer with a status and an error object."""

    def __init__(self, message: str, param: str | None = None, code: str = INVALID, status: int = 400) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As an HTTP response."""
        return JSONResponse(self.body(), self.status)

    def event(self) -> str:
        """As the data of a server-sent event."""
        return json.dumps(self.body(), ensure_ascii=False)


def cannot(path: str) -> RequestError:
    """The error for a route that the model does not support."""
    what = {"/v1/embeddings": "embed"}.get(path, "answer this route")
    return RequestError(f"{path}: this server's model cannot {what}", code="unsupported_by_model", status=404)


def of_exception(error: BaseException, request: Mapping[str, Any]) -> RequestError:
    """The answer to the client whose `request` caused `error`. Failures of the engine are also logged.

    The log holds no text of the error, since that may be the prompt's.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, VLLMNotFoundError):
        return RequestError(readable(str(error)), code="not_found", status=404)
    if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError):
        return of_message(str(error.args[0]), request, error.parameter)
    if callable(problems := getattr(error, "errors", None)):  # pydantic's
        return of_problems(problems(), request)
    if isinstance(error, OF_REQUESTS) or any(kind.__name__ == "TemplateError" for kind in type(error).__mro__):
        unsupported = isinstance(error, NotImplementedError)
        return of_message(str(error), request, code="unsupported_value" if unsupported else INVALID)
    return _of_fault(error)


def _of_fault(error: BaseException) -> RequestError:
    """A 500, for what no check of the request has found."""
    if isinstance(error, GenerationError):  # of engine/requests/client.py, whose words say why
        code = "no_possible_token" if str(error) == IMPOSSIBLE else "engine_error"
        return RequestError(str(error), code=code, status=500)
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("A request failed with %s:\n%s", type(error).__name__, frames)
    message = "the engine failed on this request; the server's log says where"
    return RequestError(message, code="engine_error", status=500)


def of_answer(error: Any, request: Mapping[str, Any]) -> RequestError:
    """The same for vLLM's ErrorInfo."""
    if error.code >= 500 and error.code != 501:
        return RequestError(readable(error.message), code="engine_error", status=error.code)
    if error.code == 404:
        param = _first(_NAMES.get(error.param or "", ()), request) or error.param
        return RequestError(readable(error.message), param, "model_not_found" if param == "model" else "not_found", 404)
    return of_message(error.message, request, error.param)


def of_message(message: str, request: Mapping[str, Any], param: str | None = None, code: str = INVALID) -> RequestError:
    """A 400 with vLLM's `message`. Without a `param` it is the field of `request` that the message names."""
    if (typed := _MUST_BE.match(message)) and typed[1] in request:
        name = typed[1]
        return RequestError(f"{name}: expected {typed[2]}, got {shown(request[name])}", name, "invalid_type")
    param = _first(_NAMES.get(param or "", ()), request) or param
    if beyond := _BEYOND.search(message):
        message = f"{beyond[1]}: expected at most this model's context of {beyond[3]} tokens, got {beyond[2]}"
        code = "context_length_exceeded"
    elif _TOO_LONG.search(message):
        room = _NO_ROOM.search(message)
        param = _first(_PROMPTS, request)
        if room and int(room[2]) >= int(room[1]):
            param = _first(BUDGETS, request) or "max_tokens"
            message = f"{param}: {room[2]} leaves no room for a prompt in this model's context of {room[1]} tokens"
        code = "context_length_exceeded"
    if param is None and _REPETITION.search(message):
        param = _first(("repetition_detection",), request)
    if param is None:
        param = _named(message, request)
    if param is None and _TOOL_CHOICE.search(message):
        param = _first(("tool_choice", "tools"), request)
    if param is None and _OF_PROMPTS.search(message):
        param = _first(_PROMPTS, request)
    if param is None and _GRAMMAR.search(message):
        param = _first(_GRAMMARS, request)
        message = f"{param}: {message}" if param else message
    return RequestError(readable(message), param, code)


def _named(message: str, request: Mapping[str, Any]) -> str | None:
    """The field of `request` that vLLM's prose is about."""
    told = message.lower().replace("chat template", "chat_template")
    if (subject := _SUBJECT.match(told)) and subject[1] in request:
        return subject[1]
    names = (match[1] for pattern in (_QUOTED, _SUBJECT, _WORD) for match in pattern.finditer(told))
    return next((name for name in names if name in request and name not in _PLAIN), None)


def _first(names: Iterable[str], request: Mapping[str, Any]) -> str | None:
    return next((name for name in names if request.get(name) is not None), None)


def readable(message: str) -> str:
    """A message without this machine's file names and without hints for vLLM's developers."""
    message = re.sub(r" ?See stack trace \(above\).*", "", message.strip(), flags=re.DOTALL)
    message = re.sub(r"\n+  File \".*", "", message, flags=re.DOTALL)
    message = _CHECK.sub("", message)
    message = _FILES.sub(lambda path: "…" if Path(path[0]).exists() else path[0], message)
    return " ".join(message.split()) or "this request is not valid"


def of_problems(
    problems: Sequence[Mapping[str, Any]], request: Any, at: tuple[str | int, ...] = (), code: str = INVALID
) -> RequestError:
    """A 400 for the one of pydantic's errors that fits the client's request best.

    For a union pydantic lists the errors of every member. Members with another `role` or `type` are left out. Of the
    rest, the problem deepest in the request counts.

    Args:
        problems: as pydantic's `errors()` gives them.
        request: what was validated.
        at: its path in the body.
        code: for errors that are neither a missing field nor a wrong type.
    """
    for problem in problems:
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, VLLMValidationError):
            return of_message(str(cause.args[0]), request, cause.parameter)
    found = [(*_place(problem["loc"], request), problem) for problem in problems]
    others = {branch for where, branch, problem in found if problem["type"] == "literal_error" and _is_tag(where)} - {
        ()
    }
    fitting = [x for x in found if not any(x[1][: len(other)] == other for other in others)] or found
    deepest = max(len(where) for where, _, _ in fitting)
    where = next(where for where, _, _ in fitting if len(where) == deepest)
    same = [problem for here, _, problem in fitting if here == where]
    first = same[0]
    path = dotted((*at, *where))
    if first["type"] == "missing":
        return RequestError(f"{path}: this field is required", path, "missing_required_parameter")
    if first["type"] == "value_error" and not path:
        return of_message(str(first["ctx"]["error"]), request)
    what = " or ".join(dict.fromkeys(_expected(problem["msg"]) for problem in same))
    if first["type"] == "value_error":
        return RequestError(readable(f"{path}: {what}"), path)
    message = f"{path or 'the body'}: expected {what}, got {shown(first.get('input'))}"
    is_type = first["type"].endswith("_type") or first["type"].endswith("_parsing")
    return RequestError(message, path or None, "invalid_type" if is_type else code)


def _expected(message: str) -> str:
    """pydantic's expectation, in JSON's words."""
    for pattern, word in _WORDS:
        message = pattern.sub(word, message)
    return message


def _place(location: Iterable[str | int], request: Any) -> tuple[tuple[str | int, ...], tuple[str | int, ...]]:
    """Splits pydantic's location: its parts in the request, and its beginning up to the last union's member.

    The parts that the request does not have are names of a union's members.
    """
    where: list[str | int] = []
    branch: tuple[str | int, ...] = ()
    location = tuple(location)
    for index, part in enumerate(location):
        if _has(request, part):
            request = request[part]
        elif index == len(location) - 1 and isinstance(request, Mapping) and re.fullmatch(r"[a-z_]+", str(part)):
            pass  # a missing field
        else:
            branch = location[: index + 1]
            continue
        where.append(part)
    return tuple(where), branch


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _is_tag(where: tuple[str | int, ...]) -> bool:
    return bool(where) and where[-1] in {"role", "type"}


def dotted(where: Iterable[str | int]) -> str:
    """`messages.0.content`."""
    return ".".join(map(str, where))


def shown(value: Any) -> str:
    """A refused value in a message: the value if it is short, otherwise its JSON type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number" if isinstance(value, int | float) else "something else")
    if isinstance(value, str | int | float | bool) and value is not None:
        try:
            text = json.dumps(value, ensure_ascii=True)
        except ValueError:  # an integer with more digits than Python prints
            return name
        return text if len(text) <= SHOWN else name
    return name
