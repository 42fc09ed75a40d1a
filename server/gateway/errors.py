"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} (OpenAI API reference, "Error codes")."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    502: "server_error",
    503: "service_unavailable_error",
}

KINDS = frozenset({*_TYPES.values(), "server_error"})  # as in the OpenAPI document's schema Error


class APIError(Exception):
    """A request is answered here, with this status and error object; `param` is the refused field, if there is one."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As an HTTP response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)

    def event(self) -> bytes:
        """As a server-sent event, for a stream that has already begun."""
        return b"data: " + json.dumps(self.body(), ensure_ascii=False).encode("utf-8") + b"\n\n"
