"""The gateway's OpenAPI 3.1 document, made of the table of routes, the schemas and the limits that it enforces."""

import functools
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import yaml

from server.config.settings import Settings
from server.gateway.errors import APIError
from server.gateway.routes import OWN, PROXIED, OwnRoute, ProxiedRoute

SCHEMAS = Path(__file__).parents[1] / "static" / "schemas.yaml"

# Statuses besides 200 that the gateway, or the engine through it, answers with, and why.
ERRORS = {
    400: "The body is no JSON object, or holds more text or sequences than one request may, or the engine refuses it",
    401: "No valid API key, or one that has expired",
    403: "The API key is not for this model",
    404: "No such model or response",
    408: "The request came too slowly",
    413: "The body is too large",
    415: "The body is not said to be JSON, or is compressed",
    429: "Too many requests of this client, in a minute or at once, or its key has used its tokens of the day",
    431: "The target and header fields are too large",
    500: "The engine failed on this request",
    502: "The engine broke off this request",
    503: "No engine that serves the model is ready, or too many requests wait for it",
}
RETRY_AFTER = {"description": "Seconds until it is worth another try", "schema": {"type": "string"}}
IGNORED = {"description": "Fields of the request that mean nothing to this server", "schema": {"type": "string"}}
_WITH_RETRY_AFTER = frozenset({429, 503})


def document(config: Settings, models: list[str]) -> dict[str, Any]:
    """The document.

    Args:
        config: has the limits that the document states.
        models: the names that requests can ask for.
    """
    components = {
        "schemas": {**_schemas(), "ModelName": {"type": "string", "examples": models}},
        "responses": {_name(status): _error(status, about) for status, about in ERRORS.items()},
    }
    if config.keys_file:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for route in PROXIED:
        paths.setdefault(route.path, {})[route.method.lower()] = _proxied(route, config)
    for own in OWN:
        paths.setdefault(own.path, {})["get"] = _own(own, config)
    for operations in paths.values():
        if "get" in operations:
            operations["head"] = _without_content(operations["get"])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "voltserve",
            "version": importlib.metadata.version("voltserve"),
            "description": _limits(config),
        },
        "paths": paths,
        "components": components,
    }


@functools.cache
def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = yaml.safe_load(SCHEMAS.read_text(encoding="utf-8"))
    return schemas


def _limits(config: Settings) -> str:
    said = [
        f"A body has at most {config.max_body_bytes} bytes and comes within {config.body_timeout:g} s.",
        f"A prompt has at most {config.max_prompt_chars} characters or tokens.",
        f"A request asks for at most {config.max_sequences} sequences (prompts times n).",
    ]
    if config.requests_per_minute:
        said.append(f"{config.requests_per_minute} requests per minute, unless the key says otherwise.")
    if config.max_concurrent:
        said.append(f"{config.max_concurrent} requests at once, unless the key says otherwise.")
    return " ".join(said)


def _proxied(route: ProxiedRoute, config: Settings) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(route.response)}}
    if route.streams:
        content["text/event-stream"] = {"schema": _reference("Event")}
    answer: dict[str, Any] = {"description": "The engine's answer", "content": content}
    operation = {
        **_operation(route.path, route.method, route.about),
        "responses": {"200": answer, **_errors(ERRORS, config)},
    }
    if route.has_body:
        answer["headers"] = {"X-Voltserve-Ignored": IGNORED}
        body = {"required": True, "content": {"application/json": {"schema": _reference(route.request)}}}
        operation["requestBody"] = body
    return _locked(operation, config, needs_key=True)


def _own(route: OwnRoute, config: Settings) -> dict[str, Any]:
    schema = _reference(route.schema) if route.schema else {"type": "string"}
    answer = {"description": route.about, "content": {route.media: {"schema": schema}}}
    responses = {"200": answer, **_errors((408, 431), config)}
    if route.schema == "Health":
        responses["503"] = answer
    if route.needs_key:
        responses.update(_errors((401, 502, 503), config))
    if "{" in route.path:
        responses.update(_errors((404,), config))
    operation = {**_operation(route.path, "GET", route.about), "responses": responses}
    return _locked(operation, config, needs_key=route.needs_key)


def _without_content(get: dict[str, Any]) -> dict[str, Any]:
    """The operation by HEAD of one by GET."""
    responses = {status: {"description": "As by GET, without content"} for status in get["responses"]}
    return {**get, "operationId": get["operationId"].replace("get_", "head_", 1), "responses": responses}


def _operation(path: str, method: str, about: str) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    words = re.findall(r"\w+", path) or ["page"]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {"operationId": "_".join([method.lower(), *words]), "summary": about, "parameters": parameters}


def _locked(operation: dict[str, Any], config: Settings, *, needs_key: bool) -> dict[str, Any]:
    return {**operation, "security": [{"key": []}]} if config.keys_file and needs_key else operation


def _errors(statuses: Any, config: Settings) -> dict[str, Any]:
    return {
        str(status): {"$ref": f"#/components/responses/{_name(status)}"}
        for status in statuses
        if status not in {401, 403} or config.keys_file
    }


def _error(status: int, about: str) -> dict[str, Any]:
    example = APIError(status, "code", about).body()
    answer: dict[str, Any] = {
        "description": about,
        "content": {"application/json": {"schema": _reference("Error"), "example": example}},
    }
    if status in _WITH_RETRY_AFTER:
        answer["headers"] = {"Retry-After": RETRY_AFTER}
    return answer


def _name(status: int) -> str:
    return f"Error{status}"


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}
