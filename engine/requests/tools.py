"""Checks and completes a request's tools, so that vLLM treats them the same with and without a stream."""

from collections.abc import Mapping
from typing import Any

from engine.requests.errors import RequestError, shown

# vLLM would let a named function without parameters answer in prose. In OpenAI's API such a function takes none.
NO_PARAMETERS = {"type": "object", "properties": {}, "const": {}}
CHOICES = ("none", "auto", "required")
_DECIDE_TYPE = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})


def prepare_chat(body: dict[str, Any]) -> None:
    """Checks and completes the tools of a chat's `body`. Raises RequestError."""
    tools = body.get("tools")
    names = set()
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue  # vLLM's model reports it
        _check_type(tool, index)
        function = tool.get("function")
        if isinstance(function, dict):
            function["parameters"] = _parameters(function.get("parameters"))
            names.add(shown(function.get("name")))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and names:
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        _check_choice(choice, name, names, "tool_choice.function.name")
    _check_beside(choice, tools)


def prepare_responses(body: dict[str, Any]) -> None:
    """The same for /v1/responses, where a tool's fields are not nested in `function`."""
    tools = body.get("tools")
    names = set()
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            _check_type(tool, index)
            tool["parameters"] = _parameters(tool.get("parameters"))
            names.add(shown(tool.get("name")))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and names:
        _check_choice(choice, choice.get("name"), names, "tool_choice.name")
    if choice != "auto":  # the default here, with or without tools
        _check_beside(choice, tools)


def _check_type(tool: Mapping[str, Any], index: int) -> None:
    kind = tool.get("type", "function")
    if kind != "function":
        path = f"tools.{index}.type"
        message = f'{path}: expected "function", got {shown(kind)}, which this server does not offer'
        raise RequestError(message, path, "unsupported_value")


def _parameters(parameters: Any) -> Any:
    if parameters is None:
        return NO_PARAMETERS
    if isinstance(parameters, dict) and not _DECIDE_TYPE & parameters.keys():
        return {"type": "object", "properties": {}, **parameters}
    return parameters


def _check_choice(choice: Mapping[str, Any], name: Any, names: set[str], path: str) -> None:
    if choice.get("type", "function") != "function":
        raise _wrong_choice(choice.get("type"), "tool_choice.type")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{path}: expected a function's name, got {shown(name)}", path, "invalid_type")
    if shown(name) not in names:
        known = ", ".join(sorted(names)) or "none"
        raise RequestError(f"{path}: expected one of the tools ({known}), got {shown(name)}", path)


def _check_beside(choice: Any, tools: Any) -> None:
    if choice is not None and not isinstance(choice, dict) and choice not in CHOICES:
        raise _wrong_choice(choice)
    if choice not in (None, "none") and tools in (None, []):
        raise RequestError("tool_choice: expected tools beside it, got none", "tool_choice")


def _wrong_choice(value: Any, path: str = "tool_choice") -> RequestError:
    return RequestError(
        f'{path}: expected "none", "auto", "required" or a function, got {shown(value)}', path, "unsupported_value"
    )


def is_forced(choice: Any) -> bool:
    """Whether `tool_choice` makes the model call a function."""
    return choice == "required" or isinstance(choice, dict)
