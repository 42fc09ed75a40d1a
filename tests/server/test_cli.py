import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quant.errors import QuantError
from quant.progress import OnProgress, Progress
from server.cli import app

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
    assert code == 2
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
    assert code == 2
    assert "does not exist" in err


def test_the_help_of_serve_lists_the_settings() -> None:
    code, out, _ = run("serve", "--help")
    assert code == 0
    assert "--drain-timeout" in out
    assert "VOLTSERVE_MAX_MODEL_LEN" in out


def test_help_imports_neither_the_gateway_nor_torch() -> None:
    code = "import sys; from server.cli import app; print([m for m in ('torch', 'fastapi', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_server_is_serve() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "--model", "/none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "/none does not exist" in done.stderr


def test_version_names_all_three() -> None:
    code, out, _ = run("version")
    assert code == 0
    assert out.startswith("voltserve ")
    assert " vllm 0.19.1" in out
    assert " torch 2.10.0" in out


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
    assert "smollm2 is in models/x" in out
    assert "downloading" in err


def test_quantize_hands_over_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.quantize import QuantizeReport

    calls = []

    def quantize(src: Path, dst: Path, **options: object) -> QuantizeReport:
        options.pop("on_progress")
        calls.append((src, dst, options))
        return QuantizeReport(("a", "b"), {"c": "ignored"}, 4_000_000, 1_000_000)

    monkeypatch.setattr("quant.quantize.quantize_checkpoint", quantize)
    code, out, _ = run(*"quantize a b --policy maxabs --group-size 32 --ignore lm_head --ignore re:x".split())
    assert code == 0
    assert calls == [(Path("a"), Path("b"), {"policy": "maxabs", "group_size": 32, "ignore": ("lm_head", "re:x")})]
    assert out.strip() == "b: 2 linear layers in NVFP4, 1 tensors kept; 4 MB became 1 MB"
