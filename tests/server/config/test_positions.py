"""Positions with every kind of scaling, compared with what the engine derives from the same config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.config.positions import scaled_positions
from tests.quant.checkpoints import CONFIG

LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "yarn, a part of a position": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.7001, "original_max_position_embeddings": 1024}
    },
    "yarn, without its original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "longrope": {"rope_scaling": {"type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1024, **LONG}},
}


def by_vllm(folder: Path) -> int:
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = get_config(folder, trust_remote_code=False)
    arch = ModelArchConfigConvertorBase(config, config.get_text_config()).convert()
    return int(_get_and_verify_max_len(config, arch, None, 10**9, disable_sliding_window=False, sliding_window=None))


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_positions_are_those_that_the_engine_derives(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIG, "max_position_embeddings": 4096, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    derived = scaled_positions(config, 4096)
    with pytest.raises(ValueError, match=rf"derived max_model_len \([a-z_]+={derived}(?:\.\d+)? or"):
        by_vllm(tmp_path)


def test_layers_of_several_kinds_share_a_scaling_and_gemma3_counts_it_already() -> None:
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert scaled_positions({"model_type": "other", "rope_parameters": rope}, 1000) == 8000
    assert scaled_positions({"model_type": "gemma3_text", "rope_parameters": rope}, 1000) == 1000


@pytest.mark.parametrize(
    "rope", [None, [], "yarn", {"factor": None}, {"factor": True}, {"type": "linear", "factor": -1}]
)
def test_a_malformed_scaling_is_none(rope: object) -> None:
    assert scaled_positions({"rope_scaling": rope}, 1000) == 1000
