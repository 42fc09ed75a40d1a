"""A whole server whose engine fails: the diagnosis in `/health`, in the log and in the exit code."""

import signal
from pathlib import Path
from typing import Any

import pytest

from server.decisions import Decision
from server.diagnosis import Diagnosis
from server.run.serve import _exit_code
from server.supervisor import State, Status
from tests.server.conftest import make_model, serving, wait_for

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total of 16 GiB"


def test_a_known_failure_is_diagnosed_in_health_log_and_exit_code(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m", print_lines=[OUT_OF_MEMORY], fail_first=99)) as served:

        def diagnosed() -> dict[str, Any] | None:
            found: dict[str, Any] | None = served.health()[1]["diagnosis"]
            return found

        diagnosis = wait_for(diagnosed, "a diagnosis in /health")
        assert diagnosis["id"] == "cuda-out-of-memory"
        assert diagnosis["found"] == OUT_OF_MEMORY
        assert any("--max-num-seqs" in step for step in diagnosis["remedy"])
        assert diagnosis["docs"] == "docs/troubleshooting.md#cuda-out-of-memory"
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == diagnosis["exit_code"] == 71
        log = served.log.read_text()
        assert "what='CUDA out of memory'" in log
        assert "Lower --max-model-len or --max-num-seqs" in log


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ValidationError: 1 validation error for ModelConfig", 78),
        ("QuantError: a (b): expected finite values, got nan in bfloat16", 65),
    ],
)
def test_a_failure_that_lasts_ends_serve_at_once_with_its_code(tmp_path: Path, line: str, code: int) -> None:
    model = make_model(tmp_path / "m", print_lines=[line], fail_first=99)
    with serving(model) as served:
        assert served.wait_for_exit() == code
        assert (model / "starts").read_text() == "1"
        log = served.log.read_text()
        assert line in log
        assert "since another start would end the same" in log


def test_a_diagnosis_goes_when_the_engine_is_ready_again(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m", print_lines=[OUT_OF_MEMORY], fail_first=1)) as served:
        body = served.wait_for_state("ready")
        assert body["restarts"] == 1
        assert body["diagnosis"] is None
        assert "what='CUDA out of memory'" in served.log.read_text()
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0


FOUND = Diagnosis("hung", "t", "timeout", "c", ("r",), "hung: x")


@pytest.mark.parametrize(
    ("state", "last_exit", "diagnosis", "code"),
    [
        (State.READY, None, None, 0),
        (State.READY, "exited with code 1", None, 0),
        (State.DEGRADED, "exited with code 1", None, 0),
        (State.LOADING, None, None, 0),
        (State.LOADING, "exited with code 1", FOUND, 75),
        (State.FAILED, "exited with code 1", FOUND, 75),
        (State.FAILED, "exited with code 1", None, 70),
    ],
)
def test_the_exit_code_says_that_the_engine_was_down(
    state: State, last_exit: str | None, diagnosis: Diagnosis | None, code: int
) -> None:
    decisions: tuple[Decision, ...] = ()
    assert _exit_code(Status(state, "", 0, 0, None, 0, last_exit, decisions, None, diagnosis)) == code
