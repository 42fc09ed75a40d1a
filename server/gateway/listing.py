"""What `/v1/models` says of each engine's models: the engine's own list, or the last one of an engine on demand."""

import contextlib
import time
from typing import Any

import httpx

from server.gateway.errors import APIError
from server.gateway.pool import Upstream

LIMIT = 10.0  # seconds; engines list their models without computing anything


class Listings:
    """Lists models, and remembers the lists of engines on demand.

    Args:
        states: whether each model is listed with its engine's state.
    """

    def __init__(self, *, states: bool) -> None:
        self._states = states
        self._last: dict[Upstream, list[dict[str, Any]]] = {}
        self._began = int(time.time())

    async def of(self, upstream: Upstream) -> list[dict[str, Any]]:
        """The models of an engine. Those of an engine on demand are listed while it does not run, too.

        Raises:
            APIError: an engine that always runs did not answer.
        """
        models = await (_ask(upstream) if upstream.demand is None else self._on_demand(upstream))
        state = {"state": upstream.status().state.value} if self._states else {}
        return [{**model, **state} for model in models]

    async def _on_demand(self, upstream: Upstream) -> list[dict[str, Any]]:
        if upstream.ready:
            with contextlib.suppress(APIError):  # it may be stopped meanwhile
                self._last[upstream] = await _ask(upstream)
        return self._last.get(upstream) or [self._unseen(name) for name in upstream.models]

    def _unseen(self, name: str) -> dict[str, Any]:
        """A model whose engine has not run yet, as vLLM describes one."""
        return {"id": name, "object": "model", "created": self._began, "owned_by": "voltserve"}


async def _ask(upstream: Upstream) -> list[dict[str, Any]]:
    try:
        answer = await upstream.client.get("/v1/models", timeout=LIMIT)
        models: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
    except httpx.HTTPError as error:
        detail = f"{type(error).__name__} {error}"
        raise APIError(502, "engine_unavailable", f"the engine did not list its models: {detail}") from error
    return models
