"""Adds our routes and error handlers to vLLM's application."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.requests import routes
from engine.requests.errors import OF_REQUESTS, RequestError, cannot, of_exception


def into(build: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `build_app`, with our routes and handlers in the application."""

    @functools.wraps(build)
    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        app.router.routes[:0] = routes.routes()
        app.add_exception_handler(RequestValidationError, _refuse)
        for kind in OF_REQUESTS:
            app.add_exception_handler(kind, _refuse)
        app.add_exception_handler(HTTPException, _refuse_by_status)
        app.middleware_stack = None  # vLLM has just built one without these handlers
        for handler in logging.getLogger("vllm").handlers:
            handler.addFilter(is_for_the_log)
        return app

    return build_app


async def _refuse(_: Request, error: Exception) -> Response:
    return of_exception(error, {}).response()


async def _refuse_by_status(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return cannot(request.url.path).response()
    return RequestError(str(error.detail), code="invalid_request", status=error.status_code).response()


def is_for_the_log(record: logging.LogRecord) -> bool:
    """Filters vLLM's log: drops errors that are the client's answer.

    Of other errors in a request it keeps only the place, since their text may be the prompt's.
    """
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, OF_REQUESTS):
        return True
    if routes.before_head.get():
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" at {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
    record.msg = f"{record.getMessage()} ({type(error).__name__}{where})"
    record.args = record.exc_info = record.exc_text = None
    return True
