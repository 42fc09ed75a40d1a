"""The errors of an engine as clients see them: in one form, short, whichever part of vLLM wrote them.

The engine itself makes what is wrong with a request readable (engine/requests/errors.py). The remaining errors are from
vLLM's own handlers and its framework: an engine that dies, a route that the model does not have.
"""

import json
import re

from server.gateway.errors import KINDS, APIError

MAX_ERROR = 2**20  # bytes of an error that are read
MAX_MESSAGE = 500  # characters of a message that are passed on
SILENT = "the engine failed on this request without saying why; the server's log has more"
CODES = {400: "invalid_value", 404: "not_found"}  # where the engine gives none

_FOR_DEVELOPERS = re.compile(r" ?See stack trace \(above\).*|\n+  File \".*", re.DOTALL)


def error_body(status: int, body: bytes) -> bytes:
    """An engine's error as OpenAI's clients expect it: {"error": {message, type, param, code}}, short."""
    try:
        value = json.loads(body)
    except ValueError:
        value = {}
    given = value.get("error") if isinstance(value, dict) else None
    if not isinstance(given, dict):
        given = {"message": value.get("detail") if isinstance(value, dict) else None}
    error = APIError(status, CODES.get(status, "engine_error"), message_text(str(given.get("message") or SILENT)))
    filled = error.body()["error"]
    if given.get("type") in KINDS:
        filled["type"] = given["type"]
    if isinstance(code := given.get("code"), str) and not code.isdigit():
        filled["code"] = code
    if isinstance(param := given.get("param"), str):
        filled["param"] = param
    return json.dumps({"error": filled}, ensure_ascii=False).encode("utf-8")


def message_text(message: str) -> str:
    """An engine's message without internals, in at most MAX_MESSAGE characters."""
    message = _FOR_DEVELOPERS.sub("", message).strip() or SILENT
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
