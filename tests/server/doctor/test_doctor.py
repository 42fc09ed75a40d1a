"""The command, on this machine and with recorded GPUs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.doctor import Finding, as_text, examine, nvml
from server.doctor.trial import ALL_REDUCE, P2P, Trial

from .test_nvml import reading


@pytest.fixture
def v100s(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Two recorded V100s; trials are answered without a GPU and listed."""
    tried: list[tuple[str, ...]] = []
    pair = {"source": 0, "destination": 1, "peer_access": True, "wrong": 0, "bytes": 1, "gb_per_s": 11.0}

    def answer(arguments: tuple[str, ...]) -> Trial:
        tried.append(arguments)
        if arguments == P2P:
            return Trial({"torch": "2.10.0", "architectures": ["sm_70"], "gpus": 2, "pairs": [pair]})
        return Trial(timed_out=True, problem="no answer within 90 s")

    monkeypatch.setattr(nvml, "read", lambda: reading("v100x2-pcie"))
    monkeypatch.setattr("server.doctor.run_trial", answer)
    return tried


def test_gpus_are_read_tried_and_judged(v100s: list[tuple[str, ...]]) -> None:
    found = examine(None, "127.0.0.1", 0, 900, quick=False)
    assert v100s == [P2P, ALL_REDUCE]
    assert [finding.check for finding in found if finding.level == "error"] == ["all-reduce"]


def test_a_quick_look_tries_nothing(v100s: list[tuple[str, ...]]) -> None:
    examine(None, "127.0.0.1", 0, 900, quick=True)
    assert not v100s


def test_without_a_gpu_the_rest_is_examined(model: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--quick", "--port", "0", "--model", str(model)])
    checks = {finding["check"] for finding in json.loads(result.stdout)["findings"]}
    assert {"driver", "shm", "ulimit", "memory", "port", "disk"} <= checks


def test_errors_turn_the_exit_code(v100s: list[tuple[str, ...]]) -> None:
    result = CliRunner().invoke(app, ["doctor", "--port", "0"])
    assert result.exit_code == 1
    assert "ERROR    all-reduce: expected an answer in time, got no answer within 90 s." in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 errors, ")


def test_a_model_that_is_none_is_an_error(tmp_path: Path) -> None:
    found = examine(tmp_path, "127.0.0.1", 0, 900, quick=True)
    assert found[-1].level == "error"
    assert str(tmp_path) in str(found[-1])


def test_the_text_has_a_line_each_and_the_sum() -> None:
    lines = as_text([Finding("ok", "a", "GPU 0", "x", "y"), Finding("warning", "a", "GPU 1", "x", "z", "Do it")])
    assert lines == "ok       GPU 0: y\nWARNING  GPU 1: expected x, got z. Do it\n0 errors, 1 warnings"
