"""Checks of conversations that vLLM makes late or not at all. Here the field's path is known."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCallParam
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.chat_utils import MM_PARSER_MAP

from engine.requests.errors import RequestError, of_problems, shown


def check(messages: Any) -> None:
    """Raises RequestError for messages of a chat that no template can take."""
    if not isinstance(messages, list):
        return  # vLLM's model reports it
    if not messages:
        raise RequestError("messages: expected at least one message, got an empty array", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if not isinstance(role := message.get("role"), str):
            path = f"messages.{index}.role"
            raise RequestError(f"{path}: expected a string, got {shown(role)}", path, "invalid_type")
        check_parts(message.get("content"), f"messages.{index}.content")
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            path = f"messages.{index}.tool_calls"
            raise RequestError(f"{path}: expected an array, got {shown(calls)}", path, "invalid_type")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            check_call(call, ("messages", index, "tool_calls", number))
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                check_arguments(function["arguments"], f"messages.{index}.tool_calls.{number}.function.arguments")


def check_call(call: Any, where: tuple[str | int, ...]) -> None:
    """Raises RequestError unless `call`, at `where` in the body, is an earlier call as OpenAI's API has it.

    vLLM's model validates calls apart from the body, so its errors have no place.
    """
    try:
        _CALL.validate_python(call)
    except ValidationError as error:
        raise of_problems(error.errors(), call, where) from None


def check_parts(content: Any, path: str) -> None:
    """Raises RequestError if a message has a part of an unknown type."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and "type" in part and not _is_part(part["type"]):
            path = f"{path}.{index}.type"
            known = ", ".join(sorted(_PARTS))
            raise RequestError(f"{path}: expected one of {known}; got {shown(part['type'])}", path, "unsupported_value")


_CALL = TypeAdapter(ChatCompletionMessageFunctionToolCallParam)
_PARTS = frozenset(MM_PARSER_MAP) - {"image_pil", "thinking"}


def _is_part(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _PARTS


def check_arguments(arguments: Any, path: str) -> None:
    """Raises RequestError unless an earlier call's arguments are empty or an object's JSON, as templates need."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{path}: expected the JSON text of an object, got {shown(arguments)}", path)


def settle(items: Iterable[Any], name: str, body: Mapping[str, Any]) -> None:
    """Makes pydantic validate the arrays inside messages now, which it otherwise does on first access.

    Raises:
        RequestError: an array is invalid; unlike pydantic's error it names the field.
    """
    for index, item in enumerate(items):
        for field, value in item.items() if isinstance(item, dict) else ():
            if type(value).__name__ != "ValidatorIterator":
                continue
            try:
                item[field] = list(value)
            except ValidationError as error:
                given = body[name][index].get(field)
                raise of_problems(error.errors(), given, (name, index, field)) from None
