"""Counts one request's tokens from the engine's answer as it passes.

The engine reports them in `usage`. A streamed completion has it only where the client asks for it, and only at its end.
A client that disconnects never receives that end. So each streamed request is changed to ask for it in every chunk
(`continuous_usage_stats`). Parts that the client did not ask for are removed from the answer. The engine's flag
--enable-force-include-usage would do the same, but also for requests whose tokens nobody counts.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from server.gateway.exchange import Answer
from server.usage import Counts

_BOTH = b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
# In JSON a quotation mark within a text is escaped, so neither pattern matches what a model wrote.
_USAGE = re.compile(rb',\s?"usage":\s?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_CHOICES = re.compile(rb'"choices":\s?\[(?:\{"index":\s?(\d+))?')
_DELTAS = re.compile(rb"^event: response\.[a-z_.]+\.delta\r?$", re.MULTILINE)
_ENDS = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\r?$", re.MULTILINE)
_BOOL: TypeAdapter[bool | None] = TypeAdapter(bool | None)  # reads "true" and 1 as the engine does
OVERLAP = 2048  # largest part of a `usage` that one chunk may end with, in bytes

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class Meter:
    """One request's tokens.

    Args:
        path: the route.
        request: its parsed body.
        model: the name that its tokens are booked under.

    Attributes:
        began: whether an answer has begun that is no error.
    """

    def __init__(self, path: str, request: Mapping[str, Any], model: str) -> None:
        self.model = model
        self.began = False
        self._path = path
        self._streams = bool(request.get("stream")) and path in {COMPLETIONS, CHAT}
        n = request.get("n")
        self._n = n if isinstance(n, int) and n > 0 else 1
        self._wants_total = self._wants_each = True
        self._asks_itself = True
        options = request.get("stream_options")
        if self._streams and (options is None or isinstance(options, dict)):
            try:
                self._wants_total = bool(_BOOL.validate_python((options or {}).get("include_usage")))
                each = bool(_BOOL.validate_python((options or {}).get("continuous_usage_stats")))
            except ValidationError:
                pass  # the engine refuses it, too
            else:
                self._wants_each = self._wants_total and each
                self._asks_itself = self._wants_each
        self._has_options = "stream_options" in request
        self._begin()

    def _begin(self) -> None:
        self._rest = b""
        self._total: dict[str, Any] | None = None
        self._of_choice: dict[int, bytes] = {}
        self._deltas = 0

    def asking(self, body: bytes) -> bytes:
        """The body to send, which asks for `usage` in each chunk where it has to."""
        if self._asks_itself:
            return body
        if self._has_options:
            value = json.loads(body)
            options = {**(value["stream_options"] or {}), "include_usage": True, "continuous_usage_stats": True}
            return json.dumps({**value, "stream_options": options}).encode("utf-8")
        # Prompts can be long, so the body is not serialized again. The object has `stream` in it, so it is not empty.
        return b"{" + _BOTH + b"," + body.lstrip(b" \t\r\n")[1:]

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer's body for the client. Of event streams that are changed only whole events are passed on."""
        self.began = True
        self._begin()  # an engine that went before a byte of its answer was passed on leaves nothing
        is_event_stream = dict(answer.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        if self._path == RESPONSES:
            read = self._read_response_events if is_event_stream else self._read_response
        else:
            read = self._read_events if is_event_stream else self._read_answer
        async for chunk in answer.chunks():
            if passed := read(chunk):
                yield passed
        if self._path == RESPONSES:
            self._end_of_response(is_event_stream)
        elif is_event_stream and self._rest:
            yield self._rest

    def counts(self) -> Counts | None:
        """The tokens so far; None where the engine has not said."""
        if self._total is not None:
            usage = self._total
            prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            completion = usage.get("completion_tokens", usage.get("output_tokens"))
            return Counts(1, 0, prompt or 0, completion or 0)
        if self._of_choice:
            said = {index: json.loads(usage) for index, usage in self._of_choice.items()}
            prompts = {index // self._n: usage["prompt_tokens"] for index, usage in said.items()}
            return Counts(1, 0, sum(prompts.values()), sum(usage["completion_tokens"] for usage in said.values()))
        if self._deltas:  # a response that broke off: at least a token each, and its prompt is not known
            return Counts(1, 1, 0, self._deltas)
        return None

    def _read_events(self, chunk: bytes) -> bytes:
        events = self._rest + chunk if self._rest else chunk
        whole, end, self._rest = events.rpartition(b"\n\n")
        if not end:
            return b""
        return b"".join([self._read_event(event) for event in whole.split(b"\n\n")])

    def _read_event(self, event: bytes) -> bytes:
        usage = _USAGE.search(event)
        if usage is None:
            return event + b"\n\n"
        choices = _CHOICES.search(event)
        if choices is None or choices[1] is None:  # the last one, with the sums
            self._total = json.loads(usage[1])
            return event + b"\n\n" if self._wants_total else b""
        self._of_choice[int(choices[1])] = usage[1]
        if self._wants_each:
            return event + b"\n\n"
        return event[: usage.start()] + event[usage.end() :] + b"\n\n"

    def _read_answer(self, chunk: bytes) -> bytes:
        text = self._rest + chunk
        if b'"usage":' in text:
            for usage in _USAGE.finditer(text):
                self._total = json.loads(usage[1])
        self._rest = text[-OVERLAP:]
        return chunk

    def _read_response(self, chunk: bytes) -> bytes:
        # A response shows the client's own tools again, whose schemas may have a `usage`: it is parsed as a whole.
        self._rest += chunk
        return chunk

    def _read_response_events(self, chunk: bytes) -> bytes:
        whole, end, rest = (self._rest + chunk).rpartition(b"\n\n")
        self._deltas += len(_DELTAS.findall(whole))
        found = _ENDS.search(whole)
        self._rest = whole[found.start() :] + end + rest if found else rest
        return chunk

    def _end_of_response(self, is_event_stream: bool) -> None:
        text = self._rest.partition(b"data:")[2].partition(b"\n")[0] if is_event_stream else self._rest
        try:
            value = json.loads(text)
        except ValueError:
            return
        response = value.get("response") if is_event_stream and isinstance(value, dict) else value
        usage = response.get("usage") if isinstance(response, dict) else None
        self._total = usage if isinstance(usage, dict) else None
