"""/v1/responses: input that repeats earlier answers, answer formats, and streams that end as whole answers do."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from openai.types.responses.response_reasoning_item import ResponseReasoningItem
from pydantic import ValidationError

from engine.requests import messages
from engine.requests.errors import RequestError, of_problems, shown
from engine.requests.tools import is_forced

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"output_text": "text", "refusal": "refusal"}  # a part's type: the field of its text
UNFINISHED = ("in_progress", "incomplete")


def prepare(body: dict[str, Any]) -> None:
    """Converts a request's input and format to a form that vLLM takes. Raises RequestError."""
    given = body.get("input")
    if not isinstance(given, str) and not (given and isinstance(given, list)):
        got = "an empty array" if given == [] else shown(given)
        raise RequestError(f"input: expected a text or at least one item, got {got}", "input", "invalid_type")
    if isinstance(given, list):
        body["input"] = [_item(item, f"input.{index}", index == len(given) - 1) for index, item in enumerate(given)]
    _check_format(body)


def _item(item: Any, path: str, is_last: bool) -> Any:
    if not isinstance(item, dict):
        return item  # vLLM's model reports it
    kind = item.get("type", "message")
    if kind not in ITEMS:
        known = ", ".join(ITEMS)
        raise RequestError(
            f"{path}.type: expected one of {known}; got {shown(kind)}", f"{path}.type", "unsupported_value"
        )
    if kind == "function_call" and "arguments" in item:
        messages.check_arguments(item["arguments"], f"{path}.arguments")
    if kind == "reasoning":
        try:
            # vLLM recognizes the item only as this type.
            return ResponseReasoningItem.model_validate({"id": "", "summary": [], **item})
        except ValidationError as error:
            raise of_problems(error.errors(), item, tuple(path.split("."))) from None
    if kind == "message":
        if item.get("role") not in ROLES:
            message = f"{path}.role: expected one of {', '.join(ROLES)}; got {shown(item.get('role'))}"
            raise RequestError(message, f"{path}.role")
        messages.check_parts(item.get("content"), f"{path}.content")
        if item.get("role") == "assistant" and not (is_last and item.get("status") in UNFINISHED):
            return {"role": "assistant", "content": _answer_text(item.get("content"), f"{path}.content")}
    return item


def _answer_text(content: Any, path: str) -> Any:
    """An earlier answer's text, joined. vLLM's models accept its parts only with ids, and read only the first."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        name = _TEXTS.get(part.get("type", ""), "text") if isinstance(part, dict) else ""
        text = part.get(name) if isinstance(part, dict) else part
        if not isinstance(text, str):
            where = f"{path}.{index}.{name}".rstrip(".")
            raise RequestError(f"{where}: expected a text, got {shown(text)}", where, "invalid_type")
        texts.append(text)
    return "".join(texts)


def _check_format(body: Mapping[str, Any]) -> None:
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict):
        if text is not None and not isinstance(text, dict):
            raise RequestError(f"text: expected an object, got {shown(text)}", "text", "invalid_type")
        if form is not None:
            raise RequestError(f"text.format: expected an object, got {shown(form)}", "text.format", "invalid_type")
        return
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = f'text.format.type: expected "text", "json_object" or "json_schema", got {shown(kind)}'
        raise RequestError(message, "text.format.type")
    if kind == "text" or is_forced(body.get("tool_choice")):  # a call has its own format
        return
    if body.get("structured_outputs") is not None:
        raise RequestError("structured_outputs: expected none beside text.format", "structured_outputs")
    schema = form.get("schema")
    if kind == "json_schema" and not isinstance(schema, dict):
        path = "text.format.schema"
        raise RequestError(f"{path}: expected an object, got {shown(schema)}", path, "invalid_type")


def without_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for vLLM, with `text.format` moved to `structured_outputs`, where vLLM takes every format."""
    moved = {name: value for name, value in body.items() if name != "text"}
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    if form["type"] != "text" and not is_forced(body.get("tool_choice")):
        is_schema = form["type"] == "json_schema"
        moved["structured_outputs"] = {"json": form["schema"]} if is_schema else {"json_object": True}
    return moved


def needs_whole(request: Any) -> bool:
    """Whether the stream must be made from the whole answer. vLLM's own shows a forced call as text, or breaks off."""
    return bool(request.tools) and request.tool_choice != "none"


def check_offered(request: Any, serving: Any) -> None:
    """Raises RequestError for tools if the engine would treat a call as text."""
    if not request.tools or request.tool_choice == "none" or serving.use_harmony:
        return
    if serving.parser is None or serving.parser.tool_parser_cls is None:
        message = "tools: this server's engine was started without --tool-call-parser, and would not see a call"
        raise RequestError(message, "tools", "unsupported_by_model")


def correct(answer: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's response, with the text format that the client requested."""
    text = body.get("text") or {}
    answer["text"] = {**text, "format": text.get("format") or {"type": "text"}}
    return answer


def sse(event: Any, body: Mapping[str, Any]) -> str:
    """One of vLLM's events, corrected, as a server-sent event."""
    if getattr(event, "response", None) is None:
        return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
    data = event.model_dump(mode="json", by_alias=True)
    correct(data["response"], body)
    if data["type"] == "response.completed":
        data["type"] = _end(data["response"])
    return _sse(data)


def events(answer: dict[str, Any]) -> Iterator[str]:
    """A whole response as a stream of server-sent events."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    data = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(answer["output"]):
        data += _item_events(item, index)
    data.append({"type": _end(answer), "response": answer})
    for number, event in enumerate(data):
        yield _sse({**event, "sequence_number": number})


def _item_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    nothing_yet: Mapping[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
    begun = {**item, **nothing_yet.get(item["type"], {}), "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        done = {"arguments": arguments, "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **at, **done}
    for number, part in enumerate(item["content"] if item["type"] == "message" else ()):
        here = {**at, "content_index": number}
        logprobs = part.get("logprobs") or []
        yield {"type": "response.content_part.added", **here, "part": {**part, "text": "", "logprobs": []}}
        yield {"type": "response.output_text.delta", **here, "delta": part["text"], "logprobs": logprobs}
        yield {"type": "response.output_text.done", **here, "text": part["text"], "logprobs": logprobs}
        yield {"type": "response.content_part.done", **here, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _end(answer: Mapping[str, Any]) -> str:
    status = answer["status"]
    return f"response.{status}" if status in ("incomplete", "failed") else "response.completed"


def _sse(data: Mapping[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
