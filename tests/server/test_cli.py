import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from quant.errors import QuantError
from quant.progress import OnProgress, Progress
from server.cli import SECTIONS, app
from server.cli.common import SETTINGS
from server.config.settings import Settings

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_explain_shows_values_sources_decisions_and_the_command(model: Path) -> None:
    code, out, _ = run("explain", "--model", str(model), "--max-num-seqs", "3")
    assert code == 0
    lines = out.splitlines()
    assert any(line.split() == ["--max-num-seqs", "3", "command", "line"] for line in lines)
    assert any("preset: cpu-smoke" in line for line in lines)
    assert any(f"-m engine --model {model}" in line for line in lines)
    assert lines[-1] == "serve would start."


def test_explain_is_json_on_demand(model: Path) -> None:
    code, out, _ = run("explain", "--json", "--model", str(model))
    explained = json.loads(out)
    assert code == 0
    assert explained["engine_flags"]["dtype"] == {"value": "float32", "source": "preset cpu-smoke"}
    assert explained["problem"] is None


def test_explain_says_what_would_stop_serve(tmp_path: Path) -> None:
    code, out, _ = run("explain", "--model", str(tmp_path / "none"))
    assert code == 65
    assert "serve would refuse: model directory" in out


@pytest.mark.parametrize("command", ["serve", "explain"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-modellen", "3"], "did you mean --max-model-len"),
        (["--port", "x"], "--port (command line)"),
        (["--uds", "x"], "is not for users of voltserve"),
        (["somewhere"], "unexpected argument 'somewhere'"),
    ],
)
def test_a_wrong_flag_exits_with_2_and_one_message(model: Path, command: str, flags: list[str], message: str) -> None:
    code, _, err = run(command, "--model", str(model), *flags)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_serve_refuses_a_missing_model_before_anything_starts(tmp_path: Path) -> None:
    code, _, err = run("serve", "--model", str(tmp_path / "none"))
    assert code == 65
    assert "does not exist" in err


def test_the_help_of_serve_lists_the_settings() -> None:
    code, out, _ = run("serve", "--help")
    assert code == 0
    assert "--drain-timeout" in out
    assert "VOLTSERVE_MAX_MODEL_LEN" in out


def test_every_setting_is_in_one_section_of_the_help_of_serve() -> None:
    listed = [name for names in SETTINGS.values() for name in names]
    assert sorted(listed) == sorted(name.replace("_", "-") for name in Settings.model_fields)
    _, out, _ = run("serve", "--help")
    assert [
        line.split()[0][2:] for line in out.splitlines() if line.startswith("  --") and " --help " not in line
    ] == listed


@pytest.mark.parametrize(("flag", "meant"), [("--jsn", "--json"), ("--agianst=x", "--against"), ("--portt", "--port")])
def test_a_misspelt_flag_names_the_nearest_of_the_command_or_of_serve(model: Path, flag: str, meant: str) -> None:
    code, _, err = run("plan", str(model), flag)
    assert code == 2
    assert err.startswith(f"voltserve: unknown flag {flag.partition('=')[0]!r}; did you mean {meant}")


def test_every_command_is_in_one_section_of_the_help() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(command.commands)
    _, out, _ = run("--help")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2:3].islower()] == listed


def test_help_imports_neither_the_gateway_nor_torch() -> None:
    code = "import sys, server.cli; print([m for m in ('torch', 'fastapi', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_server_is_serve() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "--model", "/none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 65
    assert "/none" in done.stderr
    assert "does not exist" in done.stderr


def test_version_names_all_three() -> None:
    code, out, _ = run("version")
    assert code == 0
    assert out.startswith("voltserve ")
    assert " vllm 0.28.0" in out
    assert " torch 2.10.0" in out


def test_version_checks_files_and_says_by_its_exit_code_whether_anything_is_gone(tmp_path: Path) -> None:
    good, old = tmp_path / "good.env", tmp_path / "old.env"
    good.write_text("MODEL_DIR=/m\nVOLTSERVE_MAX_MODEL_LEN=8192\n")
    old.write_text("VOLTSERVE_MAX_MODEL_LENGTH=8192\n")
    code, out, _ = run("version", "--check-config", str(good))
    assert (code, out.splitlines()[1]) == (0, "every setting is taken as it is")
    code, out, _ = run("version", "--check-config", str(good), str(old))
    assert code == 1
    assert "old.env:1: VOLTSERVE_MAX_MODEL_LENGTH: unknown environment variable" in out
    code, out, _ = run("version", "--check-config", "--json", str(old))
    assert (code, json.loads(out)["outdated"][0]["setting"]) == (1, "VOLTSERVE_MAX_MODEL_LENGTH")
    assert run("version", str(good))[0] == 2
    assert run("version", "--check-config", str(tmp_path / "none"))[0] == 2


def test_version_without_files_checks_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("version", "--check-config")[0] == 0
    monkeypatch.setenv("VOLTSERVE_GONE_LONG_AGO", "1")
    code, out, _ = run("version", "--check-config")
    assert code == 1
    assert "environment: VOLTSERVE_GONE_LONG_AGO" in out


def test_a_quant_error_is_a_message_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise QuantError("model: no such thing", "Choose another")

    monkeypatch.setattr("quant.models.fetch_model", fail)
    code, _, err = run("model", "fetch", "x", "y")
    assert code == 1
    assert err.strip() == "voltserve: model: no such thing. Choose another"


def test_fetch_hands_over_its_arguments_and_logs_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(name: str, dst: Path, on_progress: OnProgress) -> None:
        calls.append((name, dst))
        on_progress(Progress("downloading", 1, 2, "bytes"))

    monkeypatch.setattr("quant.models.fetch_model", fetch)
    code, out, err = run("model", "fetch", "smollm2", "models/x")
    assert code == 0
    assert calls == [("smollm2", Path("models/x"))]
    assert "models/x: SmolLM2-135M-Instruct of HuggingFaceTB/SmolLM2-135M-Instruct" in out
    assert "Licence Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0" in out
    assert "downloading" in err


class FakeTask:
    """Stands for what is to be quantized; notes what it was made of."""

    def __init__(self, calls: list[Any], source: Path, options: dict[str, Any]) -> None:
        calls.append((source, options))
        self.estimate = self

    def as_text(self, destination: Path) -> str:
        return f"memory and time for {destination}"

    def refuse_what_does_not_fit(self, source: Path, destination: Path) -> None:
        raise QuantError(f"{source}: too large", "Buy a larger machine")


@pytest.fixture
def quantizing(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`voltserve quantize` up to its work, which ends at once; what was asked for."""
    from quant.quantize import QuantizeReport

    calls: list[Any] = []
    monkeypatch.setattr("quant.task.prepare", lambda source, **options: FakeTask(calls, source, options))
    report = QuantizeReport(("a", "b"), {"c": "ignored"}, 4_000_000, 1_000_000)

    def run(_task: object, destination: Path, _progress: object) -> QuantizeReport:
        calls.append(destination)
        return report

    monkeypatch.setattr("quant.quantize.run", run)
    return calls


def test_quantize_hands_over_its_options(quantizing: list[Any]) -> None:
    from quant.methods import Method

    options = ["--method", "maxabs", "--group-size", "32", "--ignore", "lm_head", "--ignore", "re:x"]
    code, out, err = run("quantize", "a", "b", *options)
    assert code == 0
    from quant.selection import DEFAULT_IGNORE

    expected = {"method": Method("maxabs"), "calibration": None, "group_size": 32}
    assert quantizing == [(Path("a"), expected | {"ignore": (*DEFAULT_IGNORE, "lm_head", "re:x")}), Path("b")]
    assert out.strip() == "b: 2 linear layers in NVFP4, 1 tensors kept; 4 MB became 1 MB"
    assert err.startswith("memory and time for b")
    assert run("quantize", "a", "b", "--ignore-only", "lm_head", "--ignore", "re:x")[0] == 0
    assert quantizing[2][1]["ignore"] == ("lm_head", "re:x")


def test_quantize_hands_over_what_to_calibrate_on(tmp_path: Path, quantizing: list[Any]) -> None:
    from quant.calibrate import CalibrationSettings
    from quant.calibration_text import Text
    from quant.methods import Method

    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "words"}')
    options = ["--method", "quasar", "--compensate", "--calibration-text", str(text), "--calibration-windows", "3"]
    code, _, _ = run("quantize", "a", "b", *options)
    assert code == 0
    asked = quantizing[0][1]
    assert asked["method"] == Method("quasar", compensate=True)
    assert asked["calibration"] == CalibrationSettings(Text("words", str(text)), windows=3)


def test_a_dry_run_of_quantize_shows_what_it_takes_and_fails_where_it_would(quantizing: list[Any]) -> None:
    code, out, err = run("quantize", "a", "b", "--dry-run")
    assert code == 1
    assert out.strip() == "memory and time for b"
    assert err.strip() == "voltserve: a: too large. Buy a larger machine"
    assert Path("b") not in quantizing


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_of_quantize_says_how_to_go_on(
    tmp_path: Path, quantizing: list[Any], monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    def interrupted(_task: object, destination: Path, _progress: object) -> None:
        if begun:
            (tmp_path / ".b.resume").mkdir()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("quant.quantize.run", interrupted)
    code, _, err = run("quantize", "a", str(tmp_path / "b"))
    assert code == 130
    assert "Ctrl-C again stops at once" in err
    assert ("run the same command again to go on" in err) == begun
    assert (str(tmp_path / ".b.resume") in err) == begun
    assert signal.getsignal(signal.SIGINT) == before


def test_the_help_of_quantize_says_that_it_resumes() -> None:
    _, out, _ = run("quantize", "--help")
    assert "The same command resumes there" in " ".join(out.split())


def test_plan_shows_the_sum_and_exits_with_0_where_it_fits(planned_model: Path) -> None:
    code, out, _ = run("plan", str(planned_model), "--preset", "v100x1-16g")
    assert code == 0
    assert "4-bit weights" in out
    assert out.splitlines()[-1] == "fits."


def test_plan_exits_with_2_where_it_does_not_fit(planned_model: Path) -> None:
    code, out, _ = run("plan", "--json", str(planned_model), "--preset", "v100x1-16g", "--max-model-len", "50000")
    assert code == 2
    report = json.loads(out)
    assert not report["fits"]
    assert "--max-model-len 50000" in report["problems"][0]


@pytest.mark.parametrize("arguments", [["--preset", "cpu-smoke", "x"], []])
def test_plan_wants_the_directory_first(arguments: list[str]) -> None:
    code, _, err = run("plan", *arguments)
    assert code == 2
    assert "unexpected argument 'x'" in err or "no model given" in err


@pytest.fixture
def planned_model(tmp_path: Path) -> Path:
    from lookalikes.public_models import dense
    from tests.server.plan.test_model import write

    config, entries = dense("8B")
    return write(tmp_path, config, {"model.safetensors": entries}, index=False)


def test_eval_hands_a_directory_over_and_writes_json_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.evaluate.run import EvalReport, EvalSettings, ModelResult
    from quant.evaluate.text import TextResult

    calls = []

    def evaluate(directory: Path, source: Path | None, settings: EvalSettings, on_progress: OnProgress) -> EvalReport:
        calls.append((directory, source, settings.parts, settings.tokens, settings.w4a4))
        return EvalReport(ModelResult("m", TextResult(9, 12.5, 1.0)), None, {}, ("a note",))

    monkeypatch.setattr("quant.evaluate.run.evaluate_directory", evaluate)
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    code, out, _ = run("eval", "m", "--source", "s", "--only", "text", "--tokens", "99", "--w4a4", *files)
    assert code == 0
    assert calls == [(Path("m"), Path("s"), ("text",), 99, True)]
    assert out.splitlines() == ["m", "a note", "tokens measured: 9", "perplexity: 12.5000"]
    assert json.loads((tmp_path / "r.json").read_text())["model"]["text"]["perplexity"] == 12.5
    assert "a note" in (tmp_path / "r.html").read_text()


def test_eval_hands_a_url_over_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.evaluate.run import EvalReport, EvalSettings, ModelResult
    from quant.evaluate.server import ServerModel

    calls = []

    def evaluate(server: ServerModel, settings: EvalSettings, on_progress: OnProgress) -> EvalReport:
        calls.append(server)
        return EvalReport(ModelResult("m"), None, {}, ())

    monkeypatch.setattr("quant.evaluate.run.evaluate_server", evaluate)
    monkeypatch.setenv("VOLTSERVE_API_KEY", "k")
    code, _, _ = run("eval", "http://127.0.0.1:8000/")
    assert code == 0
    assert calls == [ServerModel("http://127.0.0.1:8000", "k")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--only", "txt"], "expected one of text, questions, long, got txt"),
        (["http://127.0.0.1:1", "--source", "s"], "--source needs a model directory"),
        (["http://127.0.0.1:1"], "expected an answer"),
        (["nowhere"], "nowhere"),
    ],
)
def test_eval_refuses_what_it_cannot_measure(arguments: list[str], message: str) -> None:
    code, _, err = run("eval", *arguments)
    assert code in (1, 2)
    assert message in err
    assert "Traceback" not in err
