"""What vLLM 0.19.1 gets wrong towards clients, and how it is mended; nothing else of the engine is ever changed.

Each was seen on the real engine (tests/e2e/test_engine_protocol.py):

- `max_tokens: null` on /v1/completions, OpenAI's way of saying "the default", is a 500 after the whole generation.
- Errors show paths of this machine and Python's view of the whole request, prompt included, and run to kilobytes.
- Errors of the framework are not in OpenAI's form, and some say nothing at all.
- `max_tokens` equal to the context: "contains 2 characters (more than 0 characters, which is the upper bound …)".
"""

import json
import re
from typing import Any

from server.gateway.errors import APIError

MAX_ERROR = 2**20  # bytes of an error that are read
MAX_MESSAGE = 500  # characters of a message that are passed on
SILENT = "the engine failed on this request without saying why; the server's log has more"

# One of pydantic's errors as vLLM prints it: {'type': …, 'loc': ('body', 'n'), 'msg': '…', 'input': …}.
_VALIDATION = re.compile(r"'loc': \('body'(?:, )?(?P<where>.*?),?\), 'msg': (?P<quote>['\"])(?P<what>.*?)(?P=quote), '")
_NO_ROOM = re.compile(r"maximum context length is (\d+) tokens\. However, you requested (\d+) output tokens")
_TRACE = re.compile(r"\n+  File \".*", re.DOTALL)


def request_body(path: str, request: dict[str, Any], body: bytes) -> bytes:
    """The body to send for a parsed `request`: `body` itself, unless it has to be mended."""
    if path == "/v1/completions" and "max_tokens" in request and request["max_tokens"] is None:
        return json.dumps({name: value for name, value in request.items() if name != "max_tokens"}).encode("utf-8")
    return body


def error_body(status: int, body: bytes) -> bytes:
    """An engine's error as OpenAI's clients expect it: {"error": {message, type, param, code}}, short."""
    try:
        value = json.loads(body)
    except ValueError:
        value = {}
    given = value.get("error") if isinstance(value, dict) else None
    if not isinstance(given, dict):
        given = {"message": value.get("detail") if isinstance(value, dict) else None}
    filled = {**APIError(status, str(status), "").body()["error"], **given}
    filled["message"] = message_text(str(given.get("message") or SILENT))
    return json.dumps({"error": filled}, ensure_ascii=False).encode("utf-8")


def message_text(message: str) -> str:
    """An engine's message without what is nobody's business, in at most MAX_MESSAGE characters."""
    message = _TRACE.sub("", message)
    problems = [_problem(match) for match in _VALIDATION.finditer(message)]
    if problems:
        message = "; ".join(dict.fromkeys(problems))
    room = _NO_ROOM.search(message)
    if room and int(room[2]) >= int(room[1]):
        message = f"max_tokens={room[2]} leaves no room for a prompt in this model's context of {room[1]} tokens"
    message = re.sub(r"(?<=\d)cannot be", " cannot be", message)
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def _problem(match: "re.Match[str]") -> str:
    """`messages.0.content: Field required`; of a union's members, only what the client wrote is named."""
    parts = [part.strip("'\"") for part in match["where"].split(", ")]
    where = ".".join(part for part in parts if re.fullmatch(r"[a-z_]+|\d+", part))
    what = match["what"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
