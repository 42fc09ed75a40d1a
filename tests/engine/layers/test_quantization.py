from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.utils import WeightsMapper

from engine import plugin
from engine.layers.linear import QuasarNvfp4LinearMethod
from engine.layers.quantization import NAME, QuasarNvfp4Config
from quant.errors import QuantError
from quant.formats import compressed_tensors, quantize_config
from quant.formats.detect import is_ours
from quant.formats.scheme import Scheme
from tests.engine.conftest import AsRank
from tests.engine.made_layers import config as make_config

CT = "compressed-tensors"


def nvfp4(**changes: Any) -> dict[str, Any]:
    return {**compressed_tensors.write_config(16, ("lm_head",)), **changes}


def group(**changes: Any) -> dict[str, Any]:
    groups: Any = nvfp4()["config_groups"]
    return {**groups["group_0"], **changes}


W4A4 = group(input_activations={"num_bits": 4, "type": "float", "dynamic": "local", "group_size": 16})
FP8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
CLAIMED = {
    "ours": nvfp4(),
    "group 32": compressed_tensors.write_config(32, ()),
    "W4A4": nvfp4(config_groups={"group_0": W4A4}),
    "format said by the group": nvfp4(config_groups={"group_0": group(format="nvfp4-pack-quantized")}),
    "the public QUASAR checkpoint's keys": nvfp4(producer={"name": "qatfactory"}, total_num_heads=24),
}
CLAIMED |= {
    "FP8": nvfp4(format="float-quantized", config_groups={"group_0": FP8}),
    "NVFP4 and FP8 mixed": nvfp4(
        format="mixed-precision",
        config_groups={"group_0": group(format="nvfp4-pack-quantized"), "group_1": FP8 | {"format": "float-quantized"}},
    ),
    "FP8 in one group": nvfp4(config_groups={"a": group(), "b": FP8 | {"format": "float-quantized"}}),
    "ModelOpt FP8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "FP8 in blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
LEFT_ALONE = {
    "MXFP4": nvfp4(format="mxfp4-pack-quantized"),
    "int4": nvfp4(format="pack-quantized"),
    "FP8 and int4 mixed": nvfp4(
        format="mixed-precision",
        config_groups={"group_0": group(format="pack-quantized"), "group_1": FP8 | {"format": "float-quantized"}},
    ),
    "AutoRound int4": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
    "GPTQ": {"quant_method": "gptq", "bits": 4},
    "nothing": {},
}


@pytest.mark.parametrize("config", CLAIMED.values(), ids=CLAIMED)
@pytest.mark.parametrize("asked_for", [None, NAME, CT])
def test_nvfp4_and_fp8_are_claimed_whatever_name_is_asked_for(config: dict[str, Any], asked_for: str | None) -> None:
    assert QuasarNvfp4Config.override_quantization_method(config, asked_for) == NAME


@pytest.mark.parametrize("config", LEFT_ALONE.values(), ids=LEFT_ALONE)
@pytest.mark.parametrize("asked_for", [None, NAME, CT])
def test_other_checkpoints_are_left_to_vllm(config: dict[str, Any], asked_for: str | None) -> None:
    assert QuasarNvfp4Config.override_quantization_method(config, asked_for) is None


def test_another_method_asked_for_by_name_is_respected() -> None:
    assert QuasarNvfp4Config.override_quantization_method(nvfp4(), "gptq") is None


def test_detection_does_not_mind_odd_configs() -> None:
    assert not is_ours({"quant_method": CT, "format": None, "config_groups": None})


def test_the_config_is_read() -> None:
    assert QuasarNvfp4Config.from_config(nvfp4()).config == compressed_tensors.scheme(16, ("lm_head",), w4a4=False)


def test_a_claimed_config_with_an_impossible_group_size_is_an_error_naming_the_key() -> None:
    weights = {**group()["weights"], "group_size": 64}
    config = nvfp4(config_groups={"group_0": group(weights=weights)})
    with pytest.raises(QuantError, match=r"config\.json.*group_0.*group_size: expected 16 or 32, got 64"):
        QuasarNvfp4Config.from_config(config)


def test_registration_is_idempotent_and_reaches_vllm() -> None:
    for _ in range(3):
        plugin.register()
    assert get_quantization_config(NAME) is QuasarNvfp4Config
    assert QUANTIZATION_METHODS.count(NAME) == 1
    # compressed-tensors itself stays vLLM's.
    assert get_quantization_config(CT).__module__.startswith("vllm.")


# A directory that quantize_config.json alone describes.


def write_model(directory: Path, **changes: Any) -> None:
    content = {"quantization_format": NAME, "version": 1, "block_size": 32, "scale_policy": "mse"} | changes
    (directory / quantize_config.FILE_NAME).write_text(json.dumps(content))
    tensors = {
        "model.layers.0.mlp.down_proj.weight_packed": torch.zeros(2, 16, dtype=torch.uint8),
        "model.layers.0.mlp.down_proj.weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.down_proj.weight_global_scale": torch.ones(1),
        "model.layers.1.mlp.down_proj.weight": torch.zeros(2, 32),
    }
    save_file(tensors, directory / "model.safetensors")


def test_quantize_config_alone_tells_group_size_and_the_files_what_is_quantized(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = QuasarNvfp4Config()
    config.maybe_update_config(str(tmp_path))
    assert config.config == compressed_tensors.scheme(32, ("model.layers.1.mlp.down_proj",))


def test_a_missing_quantize_config_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(QuantError, match=rf"{tmp_path}/quantize_config\.json is missing\. .*voltserve quantize"):
        QuasarNvfp4Config().maybe_update_config(str(tmp_path))


@pytest.mark.parametrize("config", [None, compressed_tensors.scheme(32, ())], ids=["alone", "beside config.json"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 64}, "block_size: expected 16 or 32, got 64"),
        ({"block_size": "32"}, "block_size: expected an integer, got '32'"),
        ({"quantization_format": "gptq"}, "quantization_format: expected 'quasarnvfp4', got 'gptq'"),
    ],
)
def test_a_malformed_quantize_config_is_an_error_naming_file_and_key(
    tmp_path: Path, config: Scheme | None, changes: dict[str, Any], message: str
) -> None:
    write_model(tmp_path, **changes)
    with pytest.raises(QuantError, match=rf"{tmp_path}/quantize_config\.json: {message}"):
        QuasarNvfp4Config(config).maybe_update_config(str(tmp_path))


def test_both_descriptions_must_agree(tmp_path: Path) -> None:
    write_model(tmp_path)
    QuasarNvfp4Config(compressed_tensors.scheme(32, ())).maybe_update_config(str(tmp_path))
    with pytest.raises(QuantError, match=r"block_size: expected 16 as in config\.json, got 32"):
        QuasarNvfp4Config(compressed_tensors.scheme(16, ())).maybe_update_config(str(tmp_path))


def test_config_json_alone_is_enough(tmp_path: Path) -> None:
    config = QuasarNvfp4Config(compressed_tensors.scheme(16, ()))
    config.maybe_update_config(str(tmp_path))
    config.maybe_update_config("someone/on-a-hub")
    assert config.config == compressed_tensors.scheme(16, ())


# Which layers are quantized. vLLM names fused layers, checkpoints name their members.

IGNORES = {
    "literal members": tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
    "pattern over members": (r"re:.*layers\.0\.self_attn\.[qkv]_proj",),
    "pattern over the block": (r"re:.*self_attn.*",),
    "the fused name": ("model.layers.0.self_attn.qkv_proj",),
}


def qkv(config: QuasarNvfp4Config, layer: int = 0) -> type:
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    made = QKVParallelLinear(
        32, 16, 2, 2, bias=False, quant_config=config, prefix=f"model.layers.{layer}.self_attn.qkv_proj"
    )
    return type(made.quant_method)


@pytest.mark.parametrize("ignore", IGNORES.values(), ids=IGNORES)
def test_an_ignored_fused_layer_stays_unquantized(as_rank: AsRank, ignore: tuple[str, ...]) -> None:
    as_rank(0, 1)
    assert qkv(make_config(ignore=ignore)) is UnquantizedLinearMethod


@pytest.mark.parametrize(
    "ignore",
    [(), ("lm_head",), ("re:.*visual.*",), ("model.layers.0.self_attn",), ("model.layers.1.self_attn.q_proj",)],
)
def test_a_layer_that_no_entry_names_is_quantized(as_rank: AsRank, ignore: tuple[str, ...]) -> None:
    as_rank(0, 1)
    assert qkv(make_config(ignore=ignore)) is QuasarNvfp4LinearMethod


def test_members_of_a_fused_layer_that_differ_are_an_error(as_rank: AsRank) -> None:
    as_rank(0, 1)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.qkv_proj"):
        qkv(make_config(ignore=("model.layers.0.self_attn.q_proj",)))


def test_names_are_mapped_from_the_checkpoint_to_vllm_and_patterns_are_not(as_rank: AsRank) -> None:
    as_rank(0, 1)
    config = make_config(ignore=("model.visual.merger", r"re:.*mtp.*", "lm_head"))
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.visual.": "visual."}))
    assert config.config == compressed_tensors.scheme(16, ("visual.merger", r"re:.*mtp.*", "lm_head"))
    layer = ReplicatedLinear(32, 16, bias=False, quant_config=config, prefix="visual.merger")
    assert type(layer.quant_method) is UnquantizedLinearMethod


def test_layers_that_are_no_linear_are_left_to_vllm(vllm_config: VllmConfig) -> None:
    assert make_config().get_quant_method(torch.nn.Embedding(4, 4), "model.embed_tokens") is None
