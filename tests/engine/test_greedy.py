"""A failed job keeps its reason, whichever process failed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from scripts.gpu_tp2 import greedy


def fails() -> NoReturn:
    os.write(1, b"(Worker_TP1 pid=7) INFO 11-30 loading\n(Worker_TP1 pid=7) ERROR 11-30 no room for the cache\n")
    raise RuntimeError("engine core: see the root cause above")


def is_killed() -> NoReturn:
    os.write(1, b"(EngineCore pid=8) ERROR 11-30 a worker died\n")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("generate", "reasons"),
    [
        (fails, ("see the root cause above", "(Worker_TP1 pid=7) ERROR 11-30 no room for the cache")),
        (is_killed, ("ended with code -9", "a worker died")),
    ],
)
def test_a_failed_job_keeps_what_its_workers_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate: object, reasons: tuple[str, ...]
) -> None:
    monkeypatch.setattr(greedy, "generate", lambda _flags: generate())  # type: ignore[operator]
    os.write(1, b"(Worker_TP0 pid=5) ERROR 11-30 of the job before\n")
    greedy.run({"flags": [], "output": str(tmp_path / "made.json")})
    error = json.loads((tmp_path / "made.json").read_bytes())["error"]
    assert all(reason in error for reason in reasons)
    assert "INFO" not in error
    assert "of the job before" not in error
