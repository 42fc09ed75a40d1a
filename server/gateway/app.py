"""The gateway's application: the table of proxied routes, voltserve's own routes, and errors in one form."""

from collections.abc import Callable

import httpx
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from server.config import Config
from server.gateway import health
from server.gateway.access import AccessMiddleware
from server.gateway.errors import APIError
from server.gateway.metrics import Metrics
from server.gateway.proxy import InFlight, Proxy, check_ready
from server.gateway.routes import PROXIED
from server.supervisor import Status


class Gateway:
    """The ASGI application (`app`), its metrics and its count of requests in flight.

    Args:
        config: the merged configuration.
        client: reaches the engine.
        status: the supervisor's present status.
    """

    def __init__(self, config: Config, client: httpx.AsyncClient, status: Callable[[], Status]) -> None:
        self.metrics = Metrics()
        self.in_flight = InFlight()
        self.metrics.in_flight.set_function(lambda: self.in_flight.count)
        self._client = client
        self._status = status
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        for route in PROXIED:
            proxy = Proxy(route, client, status, config.max_body_bytes, self.in_flight, self.metrics)
            app.router.routes.append(LabelledRoute(route.path, proxy, methods=[route.method]))
        app.router.routes.append(LabelledRoute("/v1/models/{model:path}", self._one_model, methods=["GET"]))
        app.include_router(health.router(config, status, client, self.metrics))
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(APIError, _api_error)
        app.add_exception_handler(Exception, _bug)
        self.app: ASGIApp = AccessMiddleware(app, self.metrics)

    async def _one_model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`, which vLLM does not serve, from the engine's list."""
        check_ready(self._status())
        name = request.path_params["model"]
        try:
            listing = (await self._client.get("/v1/models")).raise_for_status().json()
        except httpx.HTTPError as error:
            raise APIError(502, "engine_unavailable", f"the engine did not list its models: {error}") from error
        for model in listing["data"]:
            if model["id"] == name:
                return JSONResponse(model)
        served = ", ".join(model["id"] for model in listing["data"])
        raise APIError(404, "model_not_found", f"the model {name!r} does not exist; served: {served}")


class LabelledRoute(Route):
    """A route that, like FastAPI's own, puts itself into the scope: the log and the metrics read its template there."""

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
