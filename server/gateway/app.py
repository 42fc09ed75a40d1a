"""The gateway's application: the table of proxied routes, voltserve's own routes, and errors in one form."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config.settings import Settings
from server.gateway import health
from server.gateway.access import AccessMiddleware
from server.gateway.demand_figures import DemandFigures
from server.gateway.errors import APIError
from server.gateway.gpu_metrics import GpuFigures, GpuMeter, Reading
from server.gateway.guard import Guard
from server.gateway.ledger import UsageFigures
from server.gateway.listing import Listings
from server.gateway.metrics import Metrics
from server.gateway.openapi import document
from server.gateway.page import status_page
from server.gateway.pool import Pool, not_ready
from server.gateway.proxy import InFlight, Proxy
from server.gateway.routes import PROXIED


class Gateway:
    """The ASGI application (`app`), its `routes`, its metrics and its count of requests in flight.

    Args:
        config: the gateway's own settings.
        pool: the engines.
        gpus: reads the engines' GPUs; those of this machine's engines by default.

    Raises:
        ConfigError: the file of API keys cannot be used.
    """

    def __init__(self, config: Settings, pool: Pool, gpus: Callable[[], list[Reading]] | None = None) -> None:
        self.metrics = Metrics(several=pool.several)
        self.in_flight = InFlight()
        self.metrics.in_flight.set_function(lambda: self.in_flight.count)
        self.metrics.queued.set_function(lambda: pool.waiting)
        self._config = config
        self._pool = pool
        self._guard = Guard(config)
        if self._guard.ledger is not None:
            self.metrics.registry.register(UsageFigures(self._guard.ledger, lambda: self._guard.names))
        self._listings = Listings(states=pool.on_demand)
        self._documented: tuple[list[str], Response] = [], Response()
        # The document is made of the table of routes: FastAPI knows only of those that it answers itself.
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        straight: dict[tuple[str, str], ASGIApp] = {}
        for route in PROXIED:
            proxy = Proxy(route, pool, self._guard, self.in_flight, self.metrics)
            app.router.routes.append(LabelledRoute(route.path, proxy, methods=[route.method]))
            straight[route.method, route.path] = ServerErrorMiddleware(proxy, _bug)
        app.router.routes.append(LabelledRoute("/v1/models", self._models, methods=["GET"]))
        app.router.routes.append(LabelledRoute("/v1/models/{model:path}", self._one_model, methods=["GET"]))
        if gpus is None:
            devices = {gpu.uuid: gpu for one in pool.upstreams for gpu in one.config.devices.gpus}
            gpus = GpuMeter(list(devices.values())).read
        self.metrics.registry.register(GpuFigures(gpus))
        if pool.on_demand:
            demands = [upstream.demand for upstream in pool.upstreams if upstream.demand is not None]
            self.metrics.registry.register(DemandFigures(demands))
        app.include_router(health.router(config, pool, self.metrics, gpus))
        page = status_page()
        app.router.routes.append(LabelledRoute("/", page, methods=["GET"]))
        app.router.routes.append(LabelledRoute("/openapi.json", self._described, methods=["GET"]))
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(APIError, _api_error)
        app.add_exception_handler(Exception, _bug)
        self.routes = tuple(app.routes)
        answering = _with_cors(_Straight(straight, app), config.cors_origins)
        self.app: ASGIApp = AccessMiddleware(answering, self.metrics, config.forwarded_allow_ips)

    async def _described(self, _: Request) -> Response:
        """`GET /openapi.json`; made again only when the served models change."""
        models = self._pool.models
        if models != self._documented[0]:
            self._documented = models, JSONResponse(document(self._config, models))
        return self._documented[1]

    async def _models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": await self._listed(request)})

    async def _one_model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`, which vLLM does not serve, from the engines' lists."""
        name = request.path_params["model"]
        models = await self._listed(request)
        for model in models:
            if model["id"] == name:
                return JSONResponse(model)
        served = ", ".join(model["id"] for model in models)
        raise APIError(404, "model_not_found", f"the model {name!r} does not exist; served: {served}", param="model")

    async def _listed(self, request: Request) -> list[dict[str, Any]]:
        """The models that can be used now, each once; those of engines on demand in any state, with the state."""
        client = self._guard.client(request.scope)
        listed = [upstream for upstream in self._pool.upstreams if upstream.ready or upstream.demand is not None]
        if not listed:
            raise not_ready(self._pool.upstreams[0].status())
        listings = await asyncio.gather(*(self._listings.of(upstream) for upstream in listed))
        models = {model["id"]: model for listing in reversed(listings) for model in listing}
        return [model for name, model in models.items() if client.may_ask_for(name)]

    async def close(self) -> None:
        """Saves the counts. Call it when no request is left."""
        if self._guard.ledger is not None:
            await self._guard.ledger.close()


class _Straight:
    """Sends a request for one of `straight`, by method and path, to its application at once, and others to `rest`.

    FastAPI's middleware and routing would double the gateway's cost per proxied request.
    """

    def __init__(self, straight: dict[tuple[str, str], ASGIApp], rest: ASGIApp) -> None:
        self._straight = straight
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        app = self._straight.get((scope.get("method", ""), scope.get("path", "")), self._rest)
        await app(scope, receive, send)


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Answers pages of these origins only, and never with cookies. Client libraries add header fields of their own."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
        max_age=3600,
    )


class LabelledRoute(Route):
    """A route that puts itself into the scope, as FastAPI's own do. The log and the metrics read its template there."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Starlette's matching."""
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self
        return match, child


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in OpenAI's form; OPTIONS on a known route is answered with its methods."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    if error.status_code == 405:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed for {path}; allowed: {allowed}"
        return APIError(405, "method_not_allowed", message, error.headers).response()
    if error.status_code == 404:
        return APIError(404, "unknown_route", f"no route {path}").response()
    return APIError(error.status_code, "error", str(error.detail), error.headers).response()


async def _api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, APIError):
        raise error
    return error.response()


async def _bug(_: Request, error: Exception) -> Response:
    return APIError(
        500, "internal_error", f"a bug in the gateway: {type(error).__name__}; its log says more"
    ).response()
