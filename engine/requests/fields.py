"""Checks of a request that vLLM's models lack: numbers, texts, and fields without a meaning here."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.requests.errors import BUDGETS, RequestError, dotted, shown

IGNORED_HEADER = "x-voltserve-ignored"
MAX_NAMED = 16  # the most fields that the header names

# OpenAI's fields that change no answer: the request's owner, its billing and its storage.
QUIET = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention".split()  # noqa: SIM905
)

# numpy, torch and msgpack, which a request passes through, take no integers beyond these.
LOWEST, HIGHEST = -(2**63), 2**64 - 1
LENGTH_PENALTY = 50  # a beam's score is divided by its length to this power, which must be a float
# What a chat template is rendered with in any case, and vLLM's renderer's own arguments.
RENDERED = frozenset({"messages", "conversation", "tools", "chat_template", "tokenizer", "tokenize"})
_TOKEN = re.compile(r"-?[0-9]{1,10}", re.ASCII)
_HEADER_SAFE = re.compile(r"[\w.-]{1,64}", re.ASCII)

Check = Callable[[Any, Mapping[str, Any]], bool]


def _given(value: Any, _: Mapping[str, Any]) -> bool:
    return bool(value)


def _more_than_n(value: Any, body: Mapping[str, Any]) -> bool:
    return value is not None and value != (body.get("n") or 1)


def _not_text(value: Any, _: Mapping[str, Any]) -> bool:
    return value not in (None, [], ["text"])


# OpenAI's fields that would change the answer but are not supported: when they are refused, and what to do instead.
REFUSED: Mapping[str, Mapping[str, tuple[Check, str]]] = {
    "/v1/completions": {
        "best_of": (_more_than_n, "is not supported beyond n: ask for n and choose among the answers"),
    },
    "/v1/chat/completions": {
        "functions": (_given, "is not supported: use tools"),
        "function_call": (_given, "is not supported: use tool_choice"),
        "audio": (_given, "is not supported: answers are text"),
        "modalities": (_not_text, 'is not supported beyond ["text"]: answers are text'),
        "web_search_options": (_given, "is not supported: this server searches nothing"),
    },
    "/v1/responses": {
        "conversation": (_given, "is not supported: send the conversation as input"),
    },
}


def check(path: str, body: Mapping[str, Any]) -> None:
    """Raises RequestError for a value or field that no request may hold."""
    _check_values(body, ())
    if body.get("model") == "":  # which vLLM takes for none
        raise RequestError("model: expected a model's name, got ''", "model")
    given = body.get("chat_template_kwargs")
    if taken := [name for name in given if name in RENDERED] if isinstance(given, dict) else []:
        message = f"chat_template_kwargs: {', '.join(taken)} cannot be given there: other fields of the request say it"
        raise RequestError(message, "chat_template_kwargs")
    biases = body.get("logit_bias")
    for token in biases if isinstance(biases, dict) else ():
        if not _TOKEN.fullmatch(token):
            raise RequestError(f"logit_bias: expected token ids as names, got {shown(token)}", "logit_bias")
    penalty = body.get("length_penalty")
    if isinstance(penalty, int | float) and abs(penalty) > LENGTH_PENALTY:
        message = f"length_penalty: expected -{LENGTH_PENALTY} to {LENGTH_PENALTY}, got {shown(penalty)}"
        raise RequestError(message, "length_penalty")
    for name, (wrong, why) in REFUSED.get(path, {}).items():
        if name in body and wrong(body[name], body):
            raise RequestError(f"{name}: {shown(body[name])} {why}", name, "unsupported_value")


def ignored(body: Mapping[str, Any], known: Iterable[str], path: str) -> str:
    """The header's value: fields of the request without a meaning here. Empty if there are none."""
    expected = QUIET.union(known, REFUSED.get(path, {}))
    names = [name for name, value in body.items() if name not in expected and value is not None]
    safe = [name for name in names if _HEADER_SAFE.fullmatch(name)][:MAX_NAMED]
    if len(safe) < len(names):
        safe.append("...")
    return ", ".join(safe)


def _check_values(value: Any, where: tuple[str | int, ...]) -> None:
    if isinstance(value, str):
        if not value.isascii():
            _check_text(value, where)
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_text(name, where)
            _check_values(inner, (*where, name))
    elif isinstance(value, list):
        if set(map(type, value)) == {int} and LOWEST <= min(value) <= max(value) <= HIGHEST:
            return  # fast path, as for a prompt of tokens
        for index, inner in enumerate(value):
            _check_values(inner, (*where, index))
    elif isinstance(value, int):
        # Of too large a number of tokens vLLM says how many there can be.
        if value < LOWEST or (value > HIGHEST and where[0] not in BUDGETS):
            message = f"{dotted(where)}: expected a number of at most 64 bits, got {shown(value)}"
            raise RequestError(message, dotted(where))
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{dotted(where)}: expected a finite number, got {value}", dotted(where))


def _check_text(text: str, where: tuple[str | int, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        path = dotted(where) or None
        raise RequestError(f"{path or 'the body'}: expected Unicode text, got half a surrogate pair", path) from None
