"""Structured logs on stderr, text or one JSON object a line, for our own loggers and for libraries' alike."""

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, form: str, write: Callable[[str], None] | None = None) -> None:
    """Sets up logging for this process.

    Args:
        level: debug, info, warning or error.
        form: `text` or `json`.
        write: takes each finished line; stderr by default.
    """
    renderer: Any = structlog.processors.JSONRenderer(ensure_ascii=False)
    if form == "text":
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if form == "json" else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _LineLogger(write or write_stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_ToStructlog()]
    root.setLevel(_LEVELS[level])
    # One line a request is ours to write; httpx would add one for every heartbeat.
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def write_stderr(line: str) -> None:
    """Writes a finished line. Where it cannot be written, as on a full disk, it is lost: serving goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class _LineLogger:
    """What structlog hands finished lines to, whatever their level."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __getattr__(self, _: str) -> Callable[[str], None]:
        return self._write


class _ToStructlog(logging.Handler):
    """Hands records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
