from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from server.config.devices import Devices
from server.config.presets import find_preset, load_presets
from server.config.settings import Config, load_config
from server.plan.model import read_model
from server.run import engine_decisions as volta


def config(line: str) -> Config:
    with patch("server.config.settings.engine_is_cpu_build", lambda: True):
        return load_config(shlex.split(line), {}, lambda: Devices((), "no driver"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "model.layers.0.mlp.up_proj.weight_packed": torch.zeros(256, 32, dtype=torch.uint8),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(256, 4, dtype=torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_global_scale": torch.ones(1),
        "model.layers.0.self_attn.o_proj.weight_packed": torch.zeros(64, 32, dtype=torch.uint8),
        "model.layers.0.self_attn.o_proj.weight_scale": torch.zeros(64, 4, dtype=torch.float8_e4m3fn),
        "model.layers.0.self_attn.o_proj.weight_global_scale": torch.ones(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    declare(tmp_path)
    return tmp_path


def declare(folder: Path, **changes: Any) -> None:
    declared = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 64,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(declared | changes))


def choices(line: str) -> dict[str, str]:
    told, problem = volta.engine_decisions(config(line))
    assert problem is None
    return {decision.what: decision.choice for decision in told}


def test_a_preset_of_v100s_is_explained_by_the_engines_own_code(model: Path) -> None:
    told = choices(f"--model {model} --preset v100x2-16g-pcie-graphs")
    assert told["dtype"] == "float16"
    assert told["all-reduce"] == "host memory"
    assert told["CUDA graphs"] != "off"
    assert told["attention backend"]
    assert any(what.startswith("kernel for 1 ") for what in told)
    assert choices(f"--model {model} --preset v100x2-16g-pcie")["CUDA graphs"] == "off"


def test_what_stops_the_engine_is_said(model: Path) -> None:
    _, problem = volta.engine_decisions(config(f"--model {model} --preset v100x1-16g --kv-cache-dtype fp8"))
    assert problem is not None
    assert "--kv-cache-dtype: expected auto or float16 on a V100, got fp8" in problem


@pytest.mark.parametrize(
    "quantization", [{"kv_cache_scheme": {"num_bits": 8}}, {"quantization": {"kv_cache_quant_algo": "FP8"}}]
)
def test_a_checkpoints_wish_for_an_8_bit_cache_does_not_stop_it(model: Path, quantization: dict[str, Any]) -> None:
    declare(model, quantization_config=quantization)
    assert choices(f"--model {model} --preset v100x1-16g")["KV cache dtype"] == "float16"


def test_other_presets_are_not_asked_about(model: Path) -> None:
    assert volta.engine_decisions(config(f"--model {model}")) == ((), None)


def test_a_model_that_cannot_be_read_leaves_the_choices_open(tmp_path: Path) -> None:
    assert choices(f"--model {tmp_path / 'none'} --preset v100x1-16g") == {"the engine's choices": "not known"}


def test_an_engine_that_does_not_answer_leaves_the_choices_open(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volta, "EXPLAIN", ("-c", "raise SystemExit('no kernels here')"))
    (told,), _ = volta.engine_decisions(config(f"--model {model} --preset v100x1-16g"))
    assert (told.what, told.choice) == ("the engine's choices", "not known")
    assert "no kernels here" in told.reason


def test_one_layer_stands_for_all_as_one_rank_holds_it(model: Path) -> None:
    asked = config(f"--model {model} --preset v100x2-16g-sxm2")
    match = find_preset(asked.preset, load_presets()).match
    assert match is not None
    given = volta.question(asked, match, read_model(model), {"model_type": "qwen3"})
    assert given["matrix"] == [128, 64, 16]
    assert given["nvlink"] is True
