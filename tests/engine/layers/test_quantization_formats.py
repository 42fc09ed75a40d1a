"""Layers of ModelOpt and AutoRound checkpoints: claimed, loaded as they are named, computed like all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import launcher
from engine.layers.quantization import NAME, QuasarNvfp4Config
from lookalikes.auto_round import CONFIG as AUTO_ROUND
from lookalikes.linears import in_modelopt, member
from quant.errors import QuantError
from quant.formats import modelopt
from quant.formats.scheme import Scheme
from tests.engine.conftest import AsRank
from tests.engine.made_layers import finished_weight, load, make
from tests.quant.checkpoints import MODELOPT, modelopt_linear, read_shard, write_model, write_safetensors
from tests.quant.formats.test_modelopt import FLAT, nested

SECOND = "model-00002-of-00002.safetensors"


def quant(*, pre_quant_scale: bool = False) -> QuasarNvfp4Config:
    return QuasarNvfp4Config(Scheme("modelopt", "", modelopt.LAYOUT, 16, (), pre_quant_scale=pre_quant_scale))


CLAIMED: dict[str, dict[str, Any]] = {
    "flat": FLAT,
    "nested, as vLLM completes it": nested() | {"quant_method": "modelopt_fp4"},
    "no quant_method, which vLLM makes an empty one": {"quant_method": "", "quant_algo": "NVFP4"},
    "weight-only": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    "AWQ": nested(quant_algo="NVFP4_AWQ"),
    "mixed": nested(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_AWQ"}}),
    "AutoRound": AUTO_ROUND,
    "AutoRound MXFP4": AUTO_ROUND | {"data_type": "mx_fp", "group_size": 32},
}


@pytest.mark.parametrize("config", CLAIMED.values(), ids=CLAIMED)
@pytest.mark.parametrize("asked_for", [None, NAME, "modelopt", "modelopt_fp4"])
def test_every_nvfp4_format_is_claimed(config: dict[str, Any], asked_for: str | None) -> None:
    assert QuasarNvfp4Config.override_quantization_method(config, asked_for) == NAME


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixed", r"MIXED_PRECISION: expected NVFP4 and FP8 layers only, got 1 of 1 .* formats: a \(W4A8_AWQ\)"),
        ("AutoRound MXFP4", r"data_type: expected 'nv_fp' \(NVFP4\), got 'mx_fp' \(MXFP4\)"),
    ],
)
def test_what_is_claimed_but_not_supported_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(QuantError, match=message):
        QuasarNvfp4Config.from_config(CLAIMED[name])


def test_a_modelopt_linear_is_what_its_tensors_say(as_rank: AsRank) -> None:
    as_rank(0, 1)
    whole = in_modelopt(member(24, 64, 1.0), 0.3)
    layer = make("ReplicatedLinear", 64, 24, quant=quant())
    load(layer, whole)
    torch.testing.assert_close(finished_weight(layer).double(), whole.weight, rtol=1e-6, atol=0)


def test_fused_modelopt_members_keep_their_own_multipliers(as_rank: AsRank) -> None:
    as_rank(0, 1)
    parts = [in_modelopt(member(16, 64, 1.0, seed=seed), 0.1 + seed) for seed in range(2)]
    layer = make("MergedColumnParallelLinear", 64, [16, 16], quant=quant())
    for number, part in enumerate(parts):
        load(layer, part, number)
    expected = torch.cat([part.weight for part in parts])
    torch.testing.assert_close(finished_weight(layer).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_scales_its_own_inputs_by_pre_quant_scale(as_rank: AsRank, rank: int) -> None:
    as_rank(rank, 2)
    whole = in_modelopt(member(24, 64, 1.0), 0.5)
    scale = torch.linspace(0.5, 2, 64).half()
    whole.tensors["pre_quant_scale"] = scale
    layer = make("RowParallelLinear", 64, 24, quant=quant(pre_quant_scale=True))
    load(layer, whole)
    own = slice(32 * rank, 32 * rank + 32)
    expected = whole.weight[:, own] * scale[own].double()
    torch.testing.assert_close(finished_weight(layer).double(), expected, rtol=1e-6, atol=0)


def test_a_layer_whose_pre_quant_scale_was_folded_away_has_none(as_rank: AsRank) -> None:
    as_rank(0, 1)
    whole = in_modelopt(member(24, 64, 1.0), 0.5)
    layer = make("ReplicatedLinear", 64, 24, quant=quant(pre_quant_scale=True))
    load(layer, whole)
    torch.testing.assert_close(finished_weight(layer).double(), whole.weight, rtol=1e-6, atol=0)
    assert layer.pre_quant_scale is None


def fused(*scales: torch.Tensor | None) -> Any:
    layer = make("MergedColumnParallelLinear", 64, [16, 16], quant=quant(pre_quant_scale=True))
    for number, scale in enumerate(scales):
        part = in_modelopt(member(16, 64, 1.0), 0.5)
        if scale is not None:
            part.tensors["pre_quant_scale"] = scale
        load(layer, part, number)
    return layer


def test_fused_members_must_share_their_pre_quant_scale(as_rank: AsRank) -> None:
    as_rank(0, 1)
    ones = torch.ones(64)
    finished_weight(fused(ones, ones))
    with pytest.raises(QuantError, match=r"proj\.pre_quant_scale, member 1: expected the values of the members loaded"):
        fused(ones, 2 * ones)
    with pytest.raises(QuantError, match=r"proj\.pre_quant_scale, member 1: expected a tensor, got none"):
        finished_weight(fused(ones, None))


@pytest.mark.parametrize("scale", [torch.ones(63), torch.full((64,), torch.nan)])
def test_a_pre_quant_scale_that_does_not_fit_is_refused(as_rank: AsRank, scale: torch.Tensor) -> None:
    as_rank(0, 1)
    with pytest.raises(QuantError, match=r"proj\.pre_quant_scale: expected 64 numbers"):
        whole = in_modelopt(member(24, 64, 1.0), 0.5)
        whole.tensors["pre_quant_scale"] = scale
        load(make("ReplicatedLinear", 64, 24, quant=quant(pre_quant_scale=True)), whole)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "MIXED_PRECISION"])
def test_hf_quant_config_alone_reaches_vllm_whatever_its_algorithm(tmp_path: Path, algorithm: str) -> None:
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    config = nested(quant_algo=algorithm, quantized_layers={"a": {"quant_algo": "NVFP4"}})
    (model / "hf_quant_config.json").write_text(json.dumps(config))
    args = launcher.parse(["--model", str(model), "--hf-overrides", '{"max_position_embeddings": 64}'])
    assert args.hf_overrides.keys() == {"quantization_config", "max_position_embeddings"}
    given = args.hf_overrides["quantization_config"]
    assert "producer" not in given
    assert QuasarNvfp4Config.override_quantization_method(given, None) == NAME
    assert QuasarNvfp4Config.from_config(given).config == modelopt.read_config(config, "")


def test_other_models_are_left_as_they_are(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert launcher.parse(["--model", str(model)]).hf_overrides == {}
    (model / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert launcher.parse(["--model", str(model)]).hf_overrides == {}, "config.json says it"
    (model / "hf_quant_config.json").write_text(json.dumps(nested(quant_algo="INT8_SQ")))
    write_model(model, modelopt_linear, None)
    assert launcher.parse(["--model", str(model)]).hf_overrides == {}, "vLLM's own"


# What is quantized, where the config does not say it exactly.


def test_the_tensors_decide_where_exclude_modules_is_missing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    (model / "consolidated.safetensors").write_bytes(b"a file that the index does not name")
    config = QuasarNvfp4Config.from_config(nested(exclude_modules=...))
    config.maybe_update_config(str(model))
    assert config.config is not None
    ignored = set(config.config.ignore or ())
    assert {"lm_head", "model.embed_tokens"} < ignored
    assert not any("proj" in name for name in ignored)


def test_weights_that_are_neither_nvfp4_fp8_nor_16_bit_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    down = "model.layers.1.mlp.down_proj"
    tensors = read_shard(model / SECOND)
    tensors[f"{down}.weight"] = ("F8_E5M2", [64, 128], b"\x38" * 64 * 128)
    write_safetensors(model / SECOND, tensors)
    with pytest.raises(QuantError, match=rf"{down}: expected NVFP4, FP8 or 16-bit weights, got FP8 \(F8_E5M2"):
        QuasarNvfp4Config.from_config(nested()).maybe_update_config(str(model))


def test_a_model_with_a_missing_shard_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    (model / SECOND).unlink()
    with pytest.raises(QuantError, match=rf"{SECOND}: expected a file, which the index names"):
        QuasarNvfp4Config.from_config(json.loads((model / "hf_quant_config.json").read_text())).maybe_update_config(
            str(model)
        )
