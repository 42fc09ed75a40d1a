"""Every preset with models that are smaller than its limits: it serves them, and says what it changed and why."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from server.config.devices import Device, Devices
from server.config.presets import Preset, load_presets
from server.config.settings import Config, load_config
from server.errors import PreflightError
from server.plan import plan_for
from server.run import preflight
from tests.quant.checkpoints import (
    COMPRESSED_TENSORS,
    compressed_tensors_linear,
    embeddings,
    layer,
    write_json,
    write_safetensors,
    write_tokenizer,
)
from tests.quant.checkpoints import CONFIG as LLAMA

PRESETS = load_presets()
# Of models that are small in every way: what config.json says, and how large the query's linear is.
SMALL = {
    "8K positions, odd heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192},
    "one layer": {"num_hidden_layers": 1, "max_position_embeddings": 8192},
    "2K positions": {"max_position_embeddings": 2048},
}


def small_model(folder: Path, changes: dict[str, Any]) -> Path:
    folder.mkdir()
    config: dict[str, Any] = {**LLAMA, "hidden_act": "silu", **changes, "quantization_config": COMPRESSED_TENSORS}
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tensors = embeddings()
    for number in range(int(config["num_hidden_layers"])):
        tensors |= layer(number)
        prefix = f"model.layers.{number}.self_attn"
        for name, rows, columns in (
            ("q_proj", heads * size, 64),
            ("k_proj", kv_heads * size, 64),
            ("v_proj", kv_heads * size, 64),
            ("o_proj", 64, heads * size),
        ):
            tensors |= compressed_tensors_linear(f"{prefix}.{name}", rows, columns)
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder


def machine(preset: Preset) -> Devices:
    """The machine that a preset is for."""
    if preset.match is None:
        return Devices((), "no driver")
    match = preset.match
    return Devices(
        tuple(
            Device("Tesla V100", f"GPU-{index}", match.capability, match.memory_gib, bool(match.nvlink), index)
            for index in range(match.count)
        )
    )


def configured(model: Path, devices: Devices, *flags: str) -> Config:
    with engine_for(devices):
        return load_config(["--model", str(model), *flags], {}, lambda: devices)


def engine_for(devices: Devices) -> Any:
    return patch("server.config.settings.engine_is_cpu_build", lambda: not devices.gpus)


@pytest.mark.parametrize("changes", SMALL.values(), ids=SMALL)
def test_every_preset_serves_models_that_are_smaller_than_its_limits(
    tmp_path: Path, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.run.servable.engine_decisions", lambda config: ((), None))  # starts a process each
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # Ray, which some presets need
    model = small_model(tmp_path / "model", changes)
    for name, preset in PRESETS.items():
        # `serve` and `plan` with the preset's name, as smoke and quickstart's commands are, and without one.
        for flags in (["--preset", name], [] if preset.extends is None else ["--preset", name, "--enforce-eager"]):
            config = configured(model, machine(preset), *flags)
            with engine_for(config.devices):
                preflight.check(config)
            planned = plan_for(config)
            assert planned.plan.fits, (name, planned.plan.problems)
            length = config.engine.get("max-model-len")
            assert length == "auto" or int(str(length)) <= changes["max_position_embeddings"]
            changed = {one.what for one in config.decisions} & {"--max-model-len", "--tensor-parallel-size"}
            asked = preset.flags()
            assert ("--max-model-len" in changed) == (asked["max-model-len"] != length)
            ranks = config.engine.get("tensor-parallel-size", 1)
            assert ("--tensor-parallel-size" in changed) == (asked.get("tensor-parallel-size", 1) != ranks)
            assert ranks == (1 if "num_attention_heads" in changes else asked.get("tensor-parallel-size", 1))
            if ranks == 1 and preset.match and preset.match.count > 1:
                assert any(one.what == "cards" and "idle: GPU 1" in one.reason for one in config.decisions)


def test_ranks_fall_to_the_most_that_the_model_allows(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", {**SMALL["one layer"], "num_attention_heads": 6, "num_key_value_heads": 2})
    config = configured(model, machine(PRESETS["v100x4-16g-sxm2"]))
    assert (config.engine["tensor-parallel-size"], config.gpus_needed) == (2, 2)
    told = {one.what: one for one in config.decisions}
    assert "num_attention_heads=6 is not divisible" in told["--tensor-parallel-size"].reason
    assert told["cards"].choice == "GPU 0 Tesla V100, GPU 1 Tesla V100"
    assert plan_for(config).plan.fits


def test_positions_that_a_scaling_adds_are_served(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    model = small_model(tmp_path / "model", {"max_position_embeddings": 2048, "rope_scaling": yarn})
    devices = machine(PRESETS["v100x1-16g"])
    assert configured(model, devices).engine["max-model-len"] == 8192
    assert plan_for(configured(model, devices, "--max-model-len", "8192")).plan.fits
    assert not plan_for(configured(model, devices, "--max-model-len", "8193")).plan.fits


def test_what_a_user_asks_for_is_not_changed(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", SMALL["8K positions, odd heads"])
    devices = machine(PRESETS["v100x2-16g-pcie"])
    config = configured(model, devices, "--max-model-len", "9000", "--tensor-parallel-size", "2")
    assert (config.engine["max-model-len"], config.engine["tensor-parallel-size"]) == (9000, 2)
    plan = plan_for(config)
    assert any("num_attention_heads=9 is not divisible" in problem for problem in plan.plan.problems)
    assert any("--max-model-len 9000 is beyond the model's 8192 positions" in problem for problem in plan.plan.problems)
    assert plan.decision is not None
    assert "larger card" not in plan.decision.reason
    assert "lower it to 8192" in plan.decision.reason
    with engine_for(devices), pytest.raises(PreflightError, match="num_attention_heads=9"):
        preflight.check(config)


def test_a_preset_s_stages_fall_to_the_model_s_layers(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", SMALL["one layer"])
    config = configured(model, machine(PRESETS["v100x2-16g-pcie"]), "--preset", "v100x2-16g-pcie-2nodes")
    assert config.engine["pipeline-parallel-size"] == 1
    (decision,) = (one for one in config.decisions if one.what == "--pipeline-parallel-size")
    assert decision.reason == "the model has 1 layer for the preset's 2 stages"


def test_a_directory_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    config = configured(tmp_path / "none", machine(PRESETS["v100x2-16g-pcie"]))
    assert (config.engine["max-model-len"], config.engine["tensor-parallel-size"]) == (8192, 2)
