"""Decides whether a grammar may enter the batch. It asks the checker process once and remembers the answer."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import socket
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from engine.requests import checker

MAX_BYTES = 128 << 10  # of a grammar; OpenAI's limit for schemas is 120,000 characters
MAX_DEPTH = 100  # OpenAI's limit for schemas is 10
AT_ONCE = 2  # grammars compiled at the same time
WAITING = 64  # grammars that may wait for a turn
REMEMBERED = 4096
GONE = "the process that checks grammars has ended; restart the engine to have unknown grammars again"

KINDS = {  # a field of StructuredOutputsParams: the clients' name of it
    "json": "response_format",
    "structural_tag": "response_format",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
}


class Grammars:
    """The grammar checks of one API server. All methods run on one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, asyncio.Future[str]] = {}  # by grammar
        self._open: dict[str, asyncio.Future[str]] = {}  # by the question's number
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._count = 0
        self._gone = False

    async def warm(self) -> None:
        """Makes the checker build its backends, which takes seconds, before the first request with a grammar."""
        with contextlib.suppress(VLLMValidationError):
            await self.check(StructuredOutputsParams(choice=["a"]))

    async def check(self, wanted: StructuredOutputsParams | None) -> None:
        """Raises VLLMValidationError if a request's grammar cannot be compiled within the limits."""
        if wanted is None or wanted.json_object:
            return
        question, kind = written(wanted)
        key = hashlib.sha256(question).digest()
        refused = self._known.get(key)
        if refused is None:
            asked = self._asked.get(key)
            if asked is None:
                if len(self._asked) >= WAITING:
                    raise VLLMValidationError(
                        f"{WAITING} unknown grammars wait to be checked already; try again", parameter=KINDS[kind]
                    )
                asked = self._asked[key] = asyncio.ensure_future(self._ask(key, question))
            refused = await asyncio.shield(asked)
        else:
            self._known.move_to_end(key)
        if refused:
            raise VLLMValidationError(f"this {kind} cannot be followed: {refused}", parameter=KINDS[kind])

    async def _ask(self, key: bytes, question: bytes) -> str:
        try:
            async with self._turn:
                refused = await self._send(question)
        finally:
            del self._asked[key]
        if refused != GONE:
            self._known[key] = refused
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return refused

    async def _send(self, question: bytes) -> str:
        loop = asyncio.get_running_loop()
        if self._count == 0:
            loop.add_reader(self._sock, self._receive)
        self._count += 1
        number = str(self._count)
        answer: asyncio.Future[str] = loop.create_future()
        self._open[number] = answer
        try:
            if self._gone:
                return GONE
            self._sock.send(number.encode() + b"\n" + question)
            return await answer
        except OSError:
            return GONE
        finally:
            del self._open[number]

    def _receive(self) -> None:
        try:
            message = self._sock.recv(checker.ANSWER).decode()
        except BlockingIOError:
            return
        except OSError:
            message = ""
        if not message:
            self._gone = True
            asyncio.get_running_loop().remove_reader(self._sock)
            for waiting in self._open.values():
                _set(waiting, GONE)
            return
        number, _, answer = message.partition("\n")
        if number in self._open:
            _set(self._open[number], json.loads(answer))


def _set(future: "asyncio.Future[str]", result: str) -> None:
    if not future.done():
        future.set_result(result)


def written(wanted: StructuredOutputsParams) -> tuple[bytes, str]:
    """The question to the checker about a grammar, and the grammar's kind.

    Raises:
        VLLMValidationError: it is nested too deeply, or too long, or there is none.
    """
    fields: dict[str, Any] = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted)}
    asked = {name: value for name, value in fields.items() if not name.startswith("_") and value not in (None, False)}
    kind = next((name for name in KINDS if name in asked), None)
    if kind is None:
        field = "structured_outputs"
        raise VLLMValidationError(f"{field}: expected what to keep to, got none", parameter=field)
    value = asked[kind]
    if isinstance(value, str) and kind in ("json", "structural_tag"):
        deep = text_depth(value) > MAX_DEPTH
    else:
        deep = not isinstance(value, str) and depth_exceeds(value, MAX_DEPTH)
    if deep:
        raise VLLMValidationError(
            f"this {kind} is nested too deeply: expected at most {MAX_DEPTH} levels", parameter=KINDS[kind]
        )
    question = json.dumps(asked).encode()
    if len(question) > MAX_BYTES:
        raise VLLMValidationError(
            f"this {kind} is too long: expected at most {MAX_BYTES} bytes as JSON, got {len(question)}",
            parameter=KINDS[kind],
        )
    return question, kind


def text_depth(text: str) -> int:
    """How deeply brackets nest in JSON text. Brackets inside strings count, too."""
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether dicts and lists nest deeper than `limit` levels in `value`."""
    level: Iterable[Any] = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
