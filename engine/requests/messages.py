"""Conversations: what vLLM finds out late, or not at all, is found here, where the field is known."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.chat_utils import MM_PARSER_MAP

from engine.requests.errors import RequestError, of_problems, shown


def check(messages: Any) -> None:
    """Refuses a chat's messages that no template can take. Raises RequestError."""
    if not isinstance(messages, list):
        return  # vLLM's model says so
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
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                check_arguments(function["arguments"], f"messages.{index}.tool_calls.{number}.function.arguments")


def check_parts(content: Any, path: str) -> None:
    """The types of a message's parts."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and "type" in part and not _is_part(part["type"]):
            path = f"{path}.{index}.type"
            told = ", ".join(sorted(_PARTS))
            raise RequestError(f"{path}: expected one of {told}; got {shown(part['type'])}", path, "unsupported_value")


_PARTS = frozenset(MM_PARSER_MAP) - {"image_pil", "thinking"}


def _is_part(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _PARTS


def check_arguments(arguments: Any, path: str) -> None:
    """Arguments of an earlier call: an object's JSON, whose members templates go through, or nothing."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{path}: expected the JSON text of an object, got {shown(arguments)}", path)


def settle(items: Iterable[Any], name: str, body: Mapping[str, Any]) -> None:
    """Has pydantic validate now what it leaves until someone looks: the arrays inside of messages.

    Raises:
        RequestError: naming the field, which pydantic would not.
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
