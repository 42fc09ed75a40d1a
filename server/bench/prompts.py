"""Prompts of an exact number of tokens, for any model, without its files.

The server reports once how it splits a text into tokens (vLLM's `return_token_ids`). Prompts are drawn at random from
those tokens and sent as lists of token ids, which /v1/completions accepts unchanged. So the length is exact by
construction, no two prompts share a prefix that a cache could know, and no special token is among them. Random tokens
predict
nothing: speculative decoding shows its worst case.
"""

import random
from dataclasses import dataclass, field

import httpx

from quant.calibration_text import evaluation_text
from server.environment import API_KEY
from server.errors import UserError

SAMPLE_CHARACTERS = 1000  # about 250 tokens, which fit even a small context
ASK_LIMIT = 120.0  # seconds; a busy server answers after its present work


class BenchError(UserError):
    """The server cannot be measured."""

    exit_code = 1


@dataclass(frozen=True)
class Target:
    """A server: `url` without /v1, the `model` to ask for, and a `key` or nothing."""

    url: str
    model: str
    key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The header fields that say who asks."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def find_target(url: str, key: str, model: str = "") -> Target:
    """The server at `url`, and its first model where none is named.

    Raises:
        BenchError: it does not answer, or does not serve the model.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if "@" in url:
        raise BenchError(f"--url: expected no user name in it, as results name their command; a key is {API_KEY}")
    listed = _ask("GET", Target(url, model, key), "/v1/models", None).get("data")
    served = [str(one.get("id")) for one in listed or () if isinstance(one, dict)] if isinstance(listed, list) else []
    if not served or (model and model not in served):
        raise BenchError(f"{url}: expected the model {model or '(any)'}, got {', '.join(served) or 'none'}")
    return Target(url, model or served[0], key)


def token_pool(target: Target) -> tuple[int, ...]:
    """The distinct tokens of a piece of English, as the server cuts it.

    Raises:
        BenchError: the server does not say.
    """
    body = {
        "model": target.model,
        "prompt": evaluation_text().content[:SAMPLE_CHARACTERS],
        "max_tokens": 1,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    choices = _ask("POST", target, "/v1/completions", body).get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    ids = first.get("prompt_token_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
        raise BenchError(
            f"{target.url}: expected prompt_token_ids in the answer to return_token_ids, got {ids!r:.80}; "
            "prompts of exact length need a server of vLLM's kind"
        )
    return tuple(sorted(set(ids)))


def draw(pool: tuple[int, ...], length: int, *name: object) -> list[int]:
    """`length` token ids from `pool`, the same for the same `name`."""
    chooser = random.Random("/".join(map(str, name)))  # noqa: S311 — load, not secrets
    return chooser.choices(pool, k=length)


def _ask(method: str, target: Target, path: str, body: dict[str, object] | None) -> dict[str, object]:
    try:
        answer = httpx.request(method, target.url + path, json=body, headers=target.headers, timeout=ASK_LIMIT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"{target.url}{path}: expected an answer, got {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise BenchError(f"{target.url} asks for an API key: set {API_KEY}")
    if not answer.is_success:
        raise BenchError(f"{target.url}{path}: expected success, got {answer.status_code}: {answer.text[:300]}")
    try:
        value = answer.json()
    except ValueError as error:
        raise BenchError(f"{target.url}{path}: expected JSON, got {answer.text[:100]!r}") from error
    return value if isinstance(value, dict) else {}
