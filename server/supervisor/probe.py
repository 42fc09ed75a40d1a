"""Asks the engine over its Unix socket: does it answer, and can it complete a prompt?"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

POLL_INTERVAL = 0.25  # seconds between two probes of an engine that is not up yet

# The first of these requests that the engine accepts proves that it works. Pooling models have no completions; a
# model with a context of a few tokens, or --max-logprobs 0, has none that can be examined.
_PLAIN: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
_WITH_LOGPROBS = {
    "prompt": "The capital of France is",
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": 1,
    "ignore_eos": True,
}
PROOFS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", _WITH_LOGPROBS),
    ("/v1/completions", _PLAIN),
    ("/v1/embeddings", {"input": "Hello"}),
)
# Bounds of a likeliest token's natural log-probability. vLLM writes -9999 for minus infinity. No vocabulary is so large
# that its likeliest token comes near that. float32 sums may exceed a probability of 1 a little.
IMPOSSIBLE, ROUNDING = -100.0, 1e-3
# A refusal with one of these shows that the model computed NaN or infinity. The first are the words of JSON's writer.
# The second is the code of a request for which no token is possible, and a proof asks for nothing that excludes tokens.
NO_NUMBER = ("Out of range float values", "no_possible_token")
NOT_FINITE = "the model's outputs are not finite"  # configs/errors.yaml knows it by these words
CERTAIN = math.log(0.5)


class Pulse(Enum):
    """What a heartbeat found: a good answer, none, or the engine's report that its core is dead."""

    ALIVE = "alive"
    SILENT = "silent"
    DEAD = "dead"


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat's result; `detail` says why it is not ALIVE."""

    pulse: Pulse
    detail: str = ""


class EngineNotWorkingError(Exception):
    """The engine answers, but not with a completion."""


def engine_client(socket_path: str) -> httpx.AsyncClient:
    """A client for the engine's socket.

    Reading has no limit, since a generation may take any time; the number of connections has none either. Each request
    has its own connection: the engine could close an idle one just as a request is sent on it.
    """
    transport = httpx.AsyncHTTPTransport(
        uds=socket_path, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
    )
    timeout = httpx.Timeout(connect=5.0, read=None, write=30.0, pool=None)
    return httpx.AsyncClient(transport=transport, timeout=timeout, base_url="http://engine")


async def heartbeat(client: httpx.AsyncClient, limit: float) -> Heartbeat:
    """One `GET /health`, answered within `limit` seconds or not."""
    try:
        response = await asyncio.wait_for(client.get("/health"), limit)
    except asyncio.TimeoutError:
        return Heartbeat(Pulse.SILENT, f"no heartbeat within {limit:g} s")
    except httpx.HTTPError as error:
        return Heartbeat(Pulse.SILENT, f"no heartbeat: {type(error).__name__} {error}")
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return Heartbeat(Pulse.DEAD, "the engine says that its core process died")
    if response.is_success:
        return Heartbeat(Pulse.ALIVE)
    return Heartbeat(Pulse.SILENT, f"the heartbeat was answered with {response.status_code}")


async def wait_until_it_answers(client: httpx.AsyncClient) -> None:
    """Returns once the engine's `/health` answers; the caller sets the time limit."""
    while True:
        beat = await heartbeat(client, limit=5.0)
        if beat.pulse is Pulse.ALIVE:
            return
        if beat.pulse is Pulse.DEAD:
            raise EngineNotWorkingError(beat.detail)
        await asyncio.sleep(POLL_INTERVAL)


@dataclass(frozen=True)
class Proof:
    """That the engine works: the `route` that did, and what about its answer is odd."""

    route: str
    warnings: tuple[str, ...] = ()


async def prove(client: httpx.AsyncClient, model: str) -> Proof:
    """One real completion (or embedding).

    Raises:
        EngineNotWorkingError: the engine refused or broke off; says how.
    """
    refusal = ""
    for route, body in PROOFS:
        try:
            response = await client.post(route, json={"model": model, **body})
        except httpx.HTTPError as error:
            raise EngineNotWorkingError(f"{route} broke off: {type(error).__name__} {error}") from error
        if response.status_code == httpx.codes.NOT_FOUND:
            continue
        if not response.is_success and any(words in response.text for words in NO_NUMBER):
            raise EngineNotWorkingError(f"{NOT_FINITE}: {route} had NaN or infinity to answer with")
        if body is _WITH_LOGPROBS and response.status_code == httpx.codes.BAD_REQUEST:
            refusal = f"the first completion could not be examined: {response.text[:200]}"
            continue
        if not response.is_success:
            raise EngineNotWorkingError(f"{route} answered {response.status_code}: {response.text[:300]}")
        if body is not _WITH_LOGPROBS:
            return Proof(route, (refusal,) if refusal else ())
        try:
            logprobs = response.json()["choices"][0].get("logprobs") or {}
        except (ValueError, LookupError, TypeError) as error:
            raise EngineNotWorkingError(f"{route} answered with no completion: {response.text[:300]}") from error
        check_finite(logprobs)
        return Proof(route, tuple(oddities(logprobs)))
    raise EngineNotWorkingError(f"it serves none of {', '.join(dict.fromkeys(route for route, _ in PROOFS))}")


def check_finite(logprobs: Mapping[str, Any]) -> None:
    """Checks that the likeliest tokens of a completion have probabilities that a softmax of finite numbers gives.

    Raises:
        EngineNotWorkingError: one has not; whatever such a model answers is noise.
    """
    tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    for token, value in zip(tokens, values, strict=False):
        if not isinstance(value, int | float) or not IMPOSSIBLE < value < ROUNDING:
            likeliest = f"in the first completion the likeliest token, {token!r}, has the log-probability {value}"
            raise EngineNotWorkingError(f"{NOT_FINITE}: {likeliest}")


def oddities(logprobs: Mapping[str, Any]) -> list[str]:
    """Signs, in the `logprobs` of its likeliest tokens, that a model does not continue a plain sentence as a sound one
    does.

    A model of random weights passes: it may repeat a token, but hardly with certainty.
    """
    tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    if not values:
        return ["the engine gave no log-probabilities for the first completion"]
    if len(set(tokens)) == 1 and len(tokens) > 1 and min(values) > CERTAIN:
        return [f"the first completion repeats {tokens[0]!r} {len(tokens)} times, each time with near certainty"]
    return []
