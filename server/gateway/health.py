"""`/health`, `/metrics`, `/version`: what voltserve says about itself. They answer whatever the engine does."""

import asyncio
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from server.config.settings import Config, Settings
from server.gateway.gpu_metrics import Reading
from server.gateway.metrics import CONTENT_TYPE, Metrics
from server.gateway.pool import Pool, Upstream
from server.supervisor import Status

ENGINE_METRICS_LIMIT = 5.0  # seconds; a scrape must not wait for a hung engine


def report(config: Config, status: Status, began: float) -> dict[str, Any]:
    """The body of `/health`. Times in seconds."""
    progress = None
    if status.progress is not None:
        progress = {**asdict(status.progress), "elapsed": round(status.start_elapsed, 1)}
    return {
        "state": status.state.value,
        "reason": status.reason,
        "in_state_for": round(time.monotonic() - status.since, 1),
        "progress": progress,
        "model": config.served_model_name[0],
        "preset": config.preset,
        "restarts": status.restarts,
        "restart_in": None if status.retry_at is None else max(0.0, round(status.retry_at - time.monotonic(), 1)),
        "last_exit": status.last_exit,
        "diagnosis": None if status.diagnosis is None else status.diagnosis.as_dict(),
        "decisions": [asdict(decision) for decision in status.decisions],
        "warnings": list(status.warnings),
        "uptime": round(time.monotonic() - began, 1),
    }


def pool_report(pool: Pool, began: float) -> dict[str, Any]:
    """The body of `/health` but for GPUs. Of several engines, that of the first one missed, and all as `engines`."""
    shown = next(iter([*pool.lacking(), *(one for one in pool.upstreams if one.ready), *pool.upstreams]))
    body = _report(shown, began)
    if pool.several:
        body["engines"] = [_named(one, began) for one in pool.upstreams]
    return body


def _report(upstream: Upstream, began: float) -> dict[str, Any]:
    """`report`, and of an engine on demand who waits for it and why."""
    body = report(upstream.config, upstream.status(), began)
    demand = upstream.demand
    if demand is not None:
        waits_for = demand.explain() if demand.waiting else ""
        body["on_demand"] = {"waiting": demand.waiting, "waits_for": waits_for, "starts": demand.counts.starts}
    return body


def _named(upstream: Upstream, began: float) -> dict[str, Any]:
    """One of several engines; with its machine where they are on several."""
    node = {"node": upstream.node} if upstream.node else {}
    return {"name": upstream.name, **node, **_report(upstream, began)}


def versions(config: Settings, pool: Pool) -> dict[str, Any]:
    """The body of `/version`; versions from the installed distributions, without importing them."""
    return {
        **{name: importlib.metadata.version(name) for name in ("voltserve", "vllm", "torch")},
        "preset": config.preset,
        "model": pool.upstreams[0].models[0],
    }


def router(config: Settings, pool: Pool, metrics: Metrics, gpus: Callable[[], list[Reading]]) -> APIRouter:
    """The routes, over the given configuration, engines and GPUs."""
    routes = APIRouter()
    began = time.monotonic()

    @routes.api_route("/health", methods=["GET", "HEAD"])
    @routes.api_route("/health/ready", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """200 only while every model has an engine that is ready, or one on demand that can be started."""
        body = {**pool_report(pool, began), "gpus": [asdict(gpu) for gpu in gpus()]}
        return JSONResponse(body, 503 if pool.lacking() else 200)

    @routes.api_route("/health/live", methods=["GET", "HEAD"])
    async def live() -> JSONResponse:
        """200 while this process answers."""
        return JSONResponse({"live": True})

    @routes.api_route("/version", methods=["GET", "HEAD"])
    async def version() -> JSONResponse:
        """What runs here."""
        return JSONResponse(versions(config, pool))

    @routes.api_route("/metrics", methods=["GET", "HEAD"])
    async def scrape() -> Response:
        """Ours, and each engine's while it answers."""
        texts = await asyncio.gather(*(engine_metrics(one) for one in pool.upstreams))
        return Response(
            metrics.render(dict(zip((one.name for one in pool.upstreams), texts, strict=True))),
            headers={"content-type": CONTENT_TYPE},
        )

    return routes


async def engine_metrics(upstream: Upstream) -> str:
    """What an engine says of itself; nothing while it does not answer."""
    try:
        answer = await upstream.client.get("/metrics", headers={"accept": CONTENT_TYPE}, timeout=ENGINE_METRICS_LIMIT)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.is_success else ""
