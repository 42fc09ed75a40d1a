"""Decides who may ask, and how large a request may be, before the engine sees the request."""

import contextlib
import json
import math
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from starlette.types import Receive, Scope

from server.config.settings import Settings
from server.gateway.errors import APIError
from server.gateway.ledger import Ledger
from server.gateway.limits import Client, ClientLimits
from server.gateway.meter import Meter
from server.gateway.pool import Pool
from server.keys import ApiKey, KeyRing, KeysUnreadableError
from server.usage import Counts, UsageFile, usage_path

NO_MODEL = "other"  # in place of a name that is not served: clients choose names, and each is a series
ENDED_EARLY = (499, 502)  # outcomes of requests that the client, or the engine, left


class Guard:
    """Identifies clients and bounds their requests.

    Raises:
        ConfigError: the file of API keys cannot be used.
    """

    def __init__(self, config: Settings) -> None:
        self._config = config
        self._keys = KeyRing(Path(config.keys_file)) if config.keys_file else None
        self.limits = ClientLimits()
        self.ledger = Ledger(UsageFile(usage_path(config.keys_file, config.usage_file))) if self._keys else None

    @property
    def names(self) -> frozenset[str]:
        """The keys there are."""
        return frozenset() if self._keys is None else self._keys.names

    @contextlib.contextmanager
    def admitted(self, scope: Scope, *, generates: bool) -> Iterator[None]:
        """One request from its arrival to its end. Its tokens are booked at the end.

        Args:
            scope: the request's; `state` gets its `client`, at the end its `prompt_tokens` and `completion_tokens`.
            generates: whether the request makes the engine compute, so that its key's budget is asked.

        Raises:
            APIError: 401 as `client`, 429 where the client is over a limit or its key's budget.
        """
        client = self.client(scope)
        state = scope["state"]
        state["client"] = client
        if generates and client.key is not None:
            self._check_budget(client.key)
        with self.limits.counted(client):
            try:
                yield
            finally:
                meter = state.get("meter")
                if meter is not None:
                    self._book(client.name, meter, state)

    def begin(self, scope: Scope, request: dict[str, Any], body: bytes, pool: Pool) -> bytes:
        """Lets an admitted request go to the engine. Returns the body to send.

        Args:
            scope: the request's; `state` gets its `model` and, where there are keys, its `meter`.
            request: the parsed body.
            body: the body.
            pool: what is served.

        Raises:
            APIError: 403 where the key is not for the model.
        """
        state = scope["state"]
        client: Client = state["client"]
        asked = request.get("model")
        named = pool.upstreams[0].models[0] if asked in (None, "") and not pool.several else asked
        state["model"] = named if named in pool.models else NO_MODEL
        if not client.may_ask_for(named):
            allowed = ", ".join(client.key.models or ()) if client.key else ""
            message = (
                f"the API key {client.name!r} is not for the model {str(named)[:100]!r}; `model` may be: {allowed}. "
                "Whoever runs this server can make a key for others (voltserve keys add --models)"
            )
            raise APIError(403, "model_not_allowed", message)
        if self.ledger is None:
            return body
        meter = state["meter"] = Meter(scope["path"], request, state["model"])
        return meter.asking(body)

    def _check_budget(self, key: ApiKey) -> None:
        if key.tokens_per_day is None or self.ledger is None:
            return
        used = self.ledger.today(key.name)
        if used >= key.tokens_per_day:
            seconds = self.ledger.seconds_to_midnight()
            message = (
                f"the API key {key.name!r} has used {used} of its {key.tokens_per_day} tokens per day; its next day "
                f"begins at 00:00 UTC, in {seconds} s. Whoever runs this server can give it more"
            )
            raise APIError(429, "token_budget_exceeded", message, {"Retry-After": str(seconds)})

    def _book(self, name: str, meter: Meter, state: dict[str, Any]) -> None:
        counts = meter.counts()
        if counts is not None:
            state["prompt_tokens"], state["completion_tokens"] = counts.prompt, counts.completion
        elif meter.began or state.get("outcome") in ENDED_EARLY:
            counts = Counts(requests=1, uncounted=1)
        if counts is not None and self.ledger is not None:
            self.ledger.book(name, meter.model, counts)

    def client(self, scope: Scope) -> Client:
        """Who asks; the name of a key goes into the request's log line.

        Raises:
            APIError: 401 without a valid key, where keys are needed, and with one that has expired.
        """
        config = self._config
        if self._keys is None:
            address = (scope["client"] or ("local",))[0]
            return Client(address, config.requests_per_minute, config.max_concurrent)
        scheme, _, presented = header(scope, b"authorization").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not presented.strip():
            raise _unauthorized("no API key given: send it as `Authorization: Bearer KEY`")
        try:
            key = self._keys.find(presented.strip())
        except KeysUnreadableError as error:
            # The reason is in the log only: it has a path of this machine.
            raise APIError(503, "keys_unusable", "the server's file of API keys cannot be used") from error
        if key is None:
            raise _unauthorized("the API key is not valid here")
        scope["state"]["key"] = key.name
        if key.expires is not None and datetime.now(timezone.utc).date() > key.expires:
            message = f"the API key {key.name!r} expired on {key.expires}; ask whoever runs this server for a new one"
            raise APIError(401, "api_key_expired", message, {"WWW-Authenticate": "Bearer"})
        rate = config.requests_per_minute if key.requests_per_minute is None else key.requests_per_minute
        concurrent = config.max_concurrent if key.max_concurrent is None else key.max_concurrent
        return Client(key.name, rate, concurrent, key)

    async def body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole request body within the size limit; None if the client went away before its end."""
        return await read_body(header(scope, b"content-length"), receive, self._config.max_body_bytes)

    def check_size(self, request: dict[str, Any]) -> None:
        """Raises APIError 400 where a request holds more text or more sequences than one request may."""
        prompts = request.get("prompt")
        several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        if several * _number(request.get("n")) > self._config.max_sequences:
            message = f"prompts times n exceeds {self._config.max_sequences}, the most in one request (--max-sequences)"
            raise APIError(400, "too_many_sequences", message, param="n" if several == 1 else "prompt")
        sizes = {name: text_size(request.get(name)) for name in ("prompt", "messages", "input", "instructions")}
        size = sum(sizes.values())
        if size > self._config.max_prompt_chars:
            message = f"a prompt of {size} characters; at most {self._config.max_prompt_chars} (--max-prompt-chars)"
            raise APIError(400, "prompt_too_long", message, param=max(sizes, key=sizes.__getitem__))


_JSON_TYPE = re.compile(rb"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)


def check_media(scope: Scope) -> None:
    """Raises APIError 415 where a body is not said to be JSON, or is compressed."""
    kind = header(scope, b"content-type").strip()
    if kind != b"application/json" and not _JSON_TYPE.fullmatch(kind):
        got = f"Content-Type is {kind[:100].decode('latin-1')!r}" if kind else "there is no Content-Type"
        message = f"the request body must be JSON, and {got}: send the header `Content-Type: application/json`"
        raise APIError(415, "unsupported_media_type", message, {"Accept": "application/json"})
    coding = header(scope, b"content-encoding").strip().lower()
    if coding not in {b"", b"identity"}:
        message = f"Content-Encoding is {coding[:100].decode('latin-1')!r}: send the request body uncompressed"
        raise APIError(415, "unsupported_media_type", message, {"Accept-Encoding": "identity"})


def _unauthorized(message: str) -> APIError:
    return APIError(401, "invalid_api_key", message, {"WWW-Authenticate": "Bearer"})


def header(scope: Scope, name: bytes) -> bytes:
    """The first header field of this lower-case name; empty where there is none."""
    for field, value in scope["headers"]:
        if field == name:
            found: bytes = value
            return found
    return b""


async def read_body(content_length: bytes, receive: Receive, limit: int) -> bytes | None:
    """The whole request body; None if the client went away before its end.

    Args:
        content_length: that header field, if there is one; the HTTP parser has checked that it is a number.
        receive: gives the body.
        limit: bytes.

    Raises:
        APIError: 413, as soon as more than `limit` bytes are announced or received.
    """
    if content_length and int(content_length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(limit: int) -> APIError:
    return APIError(413, "request_too_large", f"the request body exceeds {limit} bytes (--max-body-bytes)")


def _no_such_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_JSON = json.JSONDecoder(parse_constant=_no_such_constant)


def parse_object(body: bytes) -> dict[str, Any]:
    """A request body's JSON object, by RFC 8259 to the letter.

    Python's parser also takes encodings besides UTF-8, NaN, Infinity, and half a surrogate pair. The engine would take
    them too, and then answer 500.

    Raises:
        APIError: 400, where it is not one.
    """
    try:
        text = body.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark (BOM)")  # noqa: TRY301
        value = _JSON.decode(text)
        if b"\\u" in body and b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _invalid("it holds half of a surrogate pair") from error
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    except ValueError as error:
        raise _invalid(str(error)) from error
    if not isinstance(value, dict):
        raise APIError(400, "invalid_json", f"the request body must be a JSON object, not {type(value).__name__}")
    return value


def _invalid(reason: str) -> APIError:
    return APIError(400, "invalid_json", f"the request body is not valid JSON: {reason}")


def text_size(value: object) -> int:
    """Characters of a prompt, a list of messages or an input; a token counts as one. Images do not count."""
    size = 0
    rest = [value]
    while rest:  # no recursion: clients choose the depth
        one = rest.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            rest += [one.get("content"), one.get("text")]
        elif isinstance(one, int):
            size += 1
    return size


def _number(value: object) -> float:
    """What the engine takes for a number, which includes texts such as "8"; 1 for anything else, which it refuses."""
    try:
        return float(value) if isinstance(value, int | float | str) else 1
    except OverflowError:
        return math.inf
    except ValueError:
        return 1
