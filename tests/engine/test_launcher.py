from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.model_executor.models import ModelRegistry

from engine import launcher
from engine.weights.loader import LOAD_FORMAT


def test_weight_loading_is_reported_by_default() -> None:
    args = launcher.parse(["--model", "somewhere"])
    assert (args.model, args.load_format) == ("somewhere", LOAD_FORMAT)


def test_the_users_flags_win() -> None:
    args = launcher.parse(["somewhere", "--load-format", "dummy", "--quantization", "quasarnvfp4", "--uds", "/x.sock"])
    assert (args.model, args.load_format, args.quantization, args.uds) == (
        "somewhere",
        "dummy",
        "quasarnvfp4",
        "/x.sock",
    )


@pytest.mark.parametrize("flags", [["--headless"], ["--api-server-count", "2"], ["--no-such-flag"]])
def test_flags_it_cannot_honour_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        launcher.parse(["--model", "somewhere", *flags])
    assert refused.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_ends_of_processes_are_told_in_words() -> None:
    ends = [("EngineCore", -9), ("Worker_TP1", 1), ("Worker_TP0", None)]
    assert launcher.describe_exits(ends) == (
        "EngineCore was killed by SIGKILL; Worker_TP1 exited with 1; Worker_TP0 still runs"
    )


@pytest.fixture
def llama() -> Iterator[str]:
    name = "LlamaForCausalLM"
    before = ModelRegistry.models[name]
    yield name
    ModelRegistry.models[name] = before


def test_a_local_models_class_is_inspected_without_another_interpreter(tmp_path: Path, llama: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel", llama]}))
    launcher.inspect_here(str(tmp_path))
    assert ModelRegistry.models[llama].model_cls.__name__ == llama
    assert "NoSuchModel" not in ModelRegistry.models


@pytest.mark.parametrize("config", [None, "{}", '{"architectures": null}'])
def test_other_models_are_left_to_vllm(tmp_path: Path, llama: str, config: str | None) -> None:
    before = ModelRegistry.models[llama]
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    launcher.inspect_here(str(tmp_path))
    assert ModelRegistry.models[llama] is before
