import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quant.progress import ignore_progress
from server.cli import app
from server.smoke import report
from server.smoke.run import Smoke, descendants
from server.smoke.steps import Step
from tests.quant.checkpoints import read_json, write_json
from tests.quant.checkpoints import write_model as write_tensors
from tests.server.conftest import alive, wait_for

ANSWER = {"word": "Paris ", "tokens": 5}


def write_model(folder: Path) -> Path:
    """A model directory that can be verified and planned."""
    write_tensors(folder)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "max_position_embeddings": 128})
    return folder


def go_through(folder: Path, model: Path, **fake: object) -> list[Step]:
    """A smoke test of one model on the fake engine."""
    if model.is_dir():
        (model / "fake.json").write_text(json.dumps({"answer": ANSWER, **fake}))
    told: list[Step] = []
    test = Smoke(folder, ignore_progress, told.append, module="tests.fakes.serve")
    test.go_through(model, [])
    assert told == test.steps
    return test.steps


def verdicts(steps: list[Step]) -> dict[str, str]:
    return {step.name: step.result.verdict for step in steps}


def test_the_whole_way_is_gone_and_nothing_is_left_running(tmp_path: Path) -> None:
    steps = go_through(tmp_path, write_model(tmp_path / "model"), spawn=True)
    assert verdicts(steps) == {
        **{"verify": "ok", "plan": "ok", "start": "ok", "completions": "ok"},
        **{"long outputs": "warning", "metrics": "ok", "stop": "ok"},  # the fake's Chinese is English
    }, report.as_dict(steps)
    assert not alive(int((tmp_path / "model" / "child.pid").read_text()))
    assert "perplexity of plain English 2.7" in steps[3].result.summary
    assert steps[-1].result.summary.startswith("3 processes ended")


def test_a_model_that_answers_broken_text_fails_and_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    answer = {"word": "\ufffd", "tokens": 5, "score": -9.0}
    steps = go_through(tmp_path, write_model(tmp_path / "model"), answer=answer)
    found = verdicts(steps)
    assert (found["completions"], found["long outputs"], found["stop"]) == ("error", "error", "ok")
    assert report.verdict_text(steps).startswith("NOT ok: 7 steps, 2 error")


def test_a_service_that_does_not_start_is_told_with_its_diagnosis_and_later_steps_are_skipped(tmp_path: Path) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15 GiB"
    steps = go_through(tmp_path, write_model(tmp_path / "model"), print_lines=[oom], fail_first=9)
    assert verdicts(steps)["start"] == "error"
    start = next(step for step in steps if step.name == "start")
    assert "max-model-len" in start.result.summary, "the catalogue's remedy is missing"
    assert [verdicts(steps)[name] for name in ("completions", "metrics", "stop")] == ["skipped"] * 3


def test_a_damaged_model_is_not_started(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "model-00002-of-00002.safetensors").unlink()
    steps = go_through(tmp_path, model)
    assert verdicts(steps)["verify"] == "error"
    assert verdicts(steps)["start"] == "skipped"
    assert "missing-shard" not in steps[-1].result.summary
    assert any("model-00002" in line for line in steps[0].result.details)


def test_a_model_that_is_not_there_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    assert verdicts(go_through(tmp_path, tmp_path / "none"))["verify"] == "error"


def test_the_report_is_a_page_and_json(tmp_path: Path) -> None:
    steps = go_through(tmp_path, write_model(tmp_path / "a<b"))
    page = report.as_html(steps)
    assert "a&lt;b" in page
    assert "WARNING" in page
    value = json.loads(json.dumps(report.as_dict(steps)))
    assert (value["verdict"], len(value["steps"])) == ("warning", 7)


def test_the_command_prints_each_step_and_ends_with_1_where_one_failed(tmp_path: Path) -> None:
    flags = ["--small", str(write_model(tmp_path / "small")), "--json", str(tmp_path / "out.json")]
    (tmp_path / "small" / "model-00001-of-00002.safetensors").unlink()
    ran = CliRunner().invoke(app, ["smoke", *flags])
    assert ran.exit_code == 1, ran.output
    lines = ran.stdout.splitlines()
    assert any(line.split()[1] == "doctor" for line in lines)
    assert lines[-1].startswith("NOT ok: ")
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "error"


def test_descendants_are_found_to_any_depth() -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        (child,) = wait_for(lambda: descendants(parent.pid), "the child")
        assert alive(child)
    finally:
        for pid in descendants(parent.pid):
            subprocess.run(["kill", str(pid)], check=True)
        parent.wait()
    assert descendants(parent.pid) == []


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VOLTSERVE_API_KEY", raising=False)
