"""The reports of an engine process about its end, besides the log. vLLM's log has the words that are listened for."""

from __future__ import annotations

import logging
import re
import site
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import faults, progress

Told = Callable[[Callable[[], object]], list[tuple[str, str]]]
CORE = logging.getLogger("vllm.v1.engine.core")
WORKERS = logging.getLogger("vllm.v1.executor.multiproc_executor")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """(type, message) of each fault reported while something runs; listening twice reports it once."""
    messages: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "_send", messages.append)
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "handlers", [one for one in log.handlers if not isinstance(one, faults.FaultHandler)])

    def run(act: Callable[[], object]) -> list[tuple[str, str]]:
        faults.listen()
        faults.listen()
        act()
        return [(one["type"], one["message"]) for one in messages if one["event"] == "fault"]

    return run


def fail(log: logging.Logger, message: str, *arguments: object) -> None:
    """An exception with a cause, logged as by `logger.exception`."""
    error = RuntimeError("Worker failed\nCUDA out of memory")
    error.__cause__ = OSError(28, "No space left on device", "/x")
    log.error(message, *arguments, exc_info=error)


CHAIN = [("OSError", "[Errno 28] No space left on device: '/x'"), ("RuntimeError", "Worker failed")]


@pytest.mark.parametrize(
    ("log", "message"),
    [(logging.getLogger(name), message) for name, messages in faults.EXCEPTIONS.items() for message in messages],
)
def test_what_ends_a_process_is_told_with_its_causes_first(told: Told, log: logging.Logger, message: str) -> None:
    assert told(lambda: fail(log, message)) == CHAIN


def test_a_failed_request_is_no_end(told: Told) -> None:
    assert told(lambda: fail(CORE, "Invocation of %s method failed", "EngineCore failed to start.")) == []
    assert told(lambda: fail(logging.getLogger("vllm.entrypoints"), "EngineCore failed to start.")) == []
    assert told(lambda: CORE.error("EngineCore failed to start.")) == []


def test_a_worker_that_died_is_told_by_another(told: Told) -> None:
    (message,) = faults.MESSAGES[WORKERS.name]
    found = told(lambda: WORKERS.error(message, "VllmWorker-1", -9))
    assert found == [("", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.")]


def test_an_exception_that_cannot_be_told_hurts_nobody(told: Told) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    (found,) = told(lambda: faults.report(MuteError()))
    assert found[0].endswith("MuteError")


def test_a_long_chain_of_causes_is_cut(told: Told) -> None:
    error = first = ValueError("last")
    for number in range(20):
        error.__context__ = ValueError(f"{number}")
        error = error.__context__
    assert len(told(lambda: faults.report(first))) == faults.MAX_CHAIN


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(module, message, id=message)
        for table in (faults.EXCEPTIONS, faults.MESSAGES)
        for module, messages in table.items()
        for message in messages
    ],
)
def test_the_installed_vllm_logs_in_these_words(module: str, message: str) -> None:
    path = Path(*module.split(".")).with_suffix(".py")
    (found,) = [Path(folder) / path for folder in site.getsitepackages() if (Path(folder) / path).is_file()]
    text = re.sub(r'"\s*\n\s*"', "", found.read_text(encoding="utf-8"))  # a message may be split over lines
    assert f'"{message}"' in text
