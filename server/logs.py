"""Structured logs on stderr, text or one JSON object per line, for our own loggers and libraries'."""

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import structlog
from structlog.typing import EventDict

from server.environment import LOG_FORMAT

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_COLOURS = {"debug": 36, "info": 32, "warning": 33, "error": 31, "critical": 31}  # ECMA-48 SGR foregrounds
_NEEDS_QUOTES = re.compile(r"[\s=\"']")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def configure(level: str, form: str, write: Callable[[str], None] | None = None) -> None:
    """Configures logging for this process.

    Args:
        level: debug, info, warning or error.
        form: `text` or `json`.
        write: takes each finished line; stderr by default.
    """
    renderer: Any = structlog.processors.JSONRenderer(ensure_ascii=False)
    if form == "text":
        renderer = TextRenderer(colours=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _LineLogger(write or write_stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_ToStructlog()]
    root.setLevel(_LEVELS[level])
    # We log one line per request; httpx would add one per heartbeat.
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def asked_form(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """The --log-format of a command line, or of the environment, before either is known to be sound."""
    form = (os.environ if environ is None else environ).get(LOG_FORMAT, "text")
    for index, token in enumerate(arguments):
        flag, equals, value = token.replace("_", "-").partition("=")
        if flag == "--log-format":
            form = value if equals else "".join(arguments[index + 1 : index + 2])
    return "json" if form == "json" else "text"


def error(what: str, **fields: object) -> None:
    """Logs an error that ends this process."""
    structlog.get_logger("voltserve").error(what, **fields)


def no_plain_lines() -> None:
    """From now on warnings and uncaught exceptions are log lines too, one JSON object each."""
    configure("info", "json")
    logging.captureWarnings(capture=True)

    def uncaught(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
        error(f"uncaught {kind.__name__}: {value}", exc_info=(kind, value or kind(), trace))

    sys.excepthook = uncaught
    threading.excepthook = lambda thread: uncaught(thread.exc_type, thread.exc_value, thread.exc_traceback)
    sys.unraisablehook = lambda one: uncaught(one.exc_type, one.exc_value, one.exc_traceback)


class TextRenderer:
    """One line per event: time, level, event, then the fields by name; an exception's lines follow.

    structlog's own renderer for consoles takes ten times as long: it was a quarter of a request's cost.
    """

    def __init__(self, *, colours: bool) -> None:
        form = "\033[{1}m{0:<8}\033[0m" if colours else "{0:<8}"
        self._levels = {level: f"[{form.format(level, colour)}]" for level, colour in _COLOURS.items()}

    def __call__(self, _: object, __: str, event: EventDict) -> str:
        """structlog's interface for processors."""
        time, level, what = event.pop("timestamp"), event.pop("level"), event.pop("event")
        after = f"\n{event.pop('exception')}" if "exception" in event else ""
        fields = " ".join([f"{name}={_shown(event[name])}" for name in sorted(event)])
        return f"{time} {self._levels[level]} {_printable(str(what))}  {fields}{after}"


def _shown(value: object) -> str:
    """A field's value; a text that could be taken for more than one value is quoted."""
    if isinstance(value, str):
        return repr(value) if _NEEDS_QUOTES.search(value) else _printable(value)
    return repr(value)


def _printable(text: str) -> str:
    """`text` with what would act on a terminal, such as an escape sequence, escaped."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def write_stderr(line: str) -> None:
    """Writes a finished line. Where it cannot be written, as on a full disk, it is lost: serving goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class _LineLogger:
    """Receives structlog's finished lines of every level."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __getattr__(self, _: str) -> Callable[[str], None]:
        return self._write


class _ToStructlog(logging.Handler):
    """Hands records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
