import json
import struct
from pathlib import Path
from typing import Any

import pytest

from lookalikes.public_models import dense, hybrid
from quant.errors import QuantError
from quant.formats.weights import nvfp4
from quant.safetensors_header import Entry
from server.plan.model import NotPlannedError, describe, layer_of, read_model
from tests.quant.checkpoints import COMPRESSED_TENSORS, write_tokenizer

from .models import model


def write(folder: Path, config: dict[str, Any], shards: dict[str, dict[str, Entry]], *, index: bool) -> Path:
    """A model directory whose shards' data are holes."""
    quantized = any(name.endswith("weight_packed") for entries in shards.values() for name in entries)
    ignore = ["lm_head", "re:.*(visual|mtp|gate$|in_proj_[ab]$)"]
    declared = {"quantization_config": COMPRESSED_TENSORS | {"ignore": ignore}} if quantized else {}
    (folder / "config.json").write_text(json.dumps(declared | config))
    for shard, entries in shards.items():
        header, end = {}, 0
        for name, entry in entries.items():
            size = entry.end - entry.start
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    write_tokenizer(folder)
    if index:
        weight_map = {name: shard for shard, entries in shards.items() for name in entries}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_the_public_hybrid_has_496_quantized_linears_and_its_bytes() -> None:
    found = model("27B")
    assert len(found.linears) == 496
    assert {linear.kind.columns for linear in found.linears} == {16}
    assert (found.kinds.count("full"), found.kinds.count("linear")) == (16, 48)
    assert found.rotary_dim == 64
    codes_and_scales = sum(linear.rows * linear.columns * 9 // 16 for linear in found.linears)
    # Its files are 19.7 GB: embedding and head are 2 x 2.543 of these, vision 0.921 (the model's card).
    assert codes_and_scales + sum(tensor.nbytes for tensor in found.plain) == pytest.approx(19.7e9, rel=0.01)


def test_what_the_engine_does_not_load_is_not_counted() -> None:
    names = {tensor.name for tensor in model("27B").plain}
    assert not [name for name in names if name.startswith("mtp.") or name.endswith("input_global_scale")]


def test_modelopt_s_names_are_quantized_linears_too() -> None:
    config, _ = dense("8B")
    entries = {
        "model.layers.0.mlp.up_proj.weight": Entry("U8", (64, 32), 0, 2048),
        "model.layers.0.mlp.up_proj.weight_scale": Entry("F8_E4M3", (64, 4), 0, 256),
        "model.layers.0.mlp.up_proj.weight_scale_2": Entry("F32", (), 0, 4),
        "model.layers.0.mlp.up_proj.input_scale": Entry("F32", (), 0, 4),
        "model.norm.weight": Entry("BF16", (8,), 0, 16),
    }
    found = describe(config, entries, "x")
    assert [(one.name, one.rows, one.columns, one.kind) for one in found.linears] == [
        ("model.layers.0.mlp.up_proj", 64, 64, nvfp4(16))
    ]
    assert [tensor.name for tensor in found.plain] == ["model.norm.weight"]


@pytest.mark.parametrize("index", [False, True])
def test_all_shards_of_a_directory_are_read(tmp_path: Path, index: bool) -> None:
    config, entries = dense("8B")
    names = sorted(entries)
    shards = {
        "a.safetensors": {n: entries[n] for n in names[:300]},
        "b.safetensors": {n: entries[n] for n in names[300:]},
    }
    found = read_model(write(tmp_path, config, shards, index=index))
    assert len(found.linears) == len(model("8B").linears)
    assert sum(t.nbytes for t in found.plain) == sum(t.nbytes for t in model("8B").plain)


def test_a_shard_that_the_index_names_and_is_missing_is_named(tmp_path: Path) -> None:
    config, entries = dense("8B")
    write(tmp_path, config, {"a.safetensors": entries}, index=True)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(QuantError, match=r"a\.safetensors"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive number, got 0"),
        ({"hidden_size": "5120"}, "hidden_size: expected an integer, got '5120'"),
        ({"vocab_size": None}, "vocab_size: expected a positive number"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 36 entries, got 1"),
    ],
)
def test_a_malformed_config_names_the_key(changes: dict[str, Any], message: str) -> None:
    config, entries = dense("8B", **changes)
    with pytest.raises(QuantError, match=message):
        describe(config, entries, "config.json")


@pytest.mark.parametrize(
    "changes", [{"kv_lora_rank": 512}, {"is_encoder_decoder": True}, {"layer_types": ["chunked_attention"] * 36}]
)
def test_a_kind_of_model_that_is_not_computed_says_so(changes: dict[str, Any]) -> None:
    config, entries = dense("8B", **changes)
    with pytest.raises(NotPlannedError, match=r"config\.json"):
        describe(config, entries, "config.json")


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, {"full"}),
        ({"sliding_window": 4096}, {"full"}),  # Qwen's use_sliding_window is false
        ({"sliding_window": 4096, "use_sliding_window": True}, {"sliding"}),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}, {"sliding", "full"}),
    ],
)
def test_the_kinds_of_layers_follow_from_the_config(changes: dict[str, Any], kinds: set[str]) -> None:
    found = model("8B", **changes)
    assert set(found.kinds) == kinds
    assert (found.window > 0) == ("sliding" in kinds)


def test_layers_of_the_vision_tower_are_not_the_decoder_s() -> None:
    assert layer_of("model.language_model.layers.7.mlp.up_proj") == 7
    assert layer_of("model.visual.layers.7.fc1") is None
    assert layer_of("lm_head.weight") is None


def test_the_hybrid_s_text_config_is_read() -> None:
    config, entries = hybrid()
    del config["text_config"]["linear_num_key_heads"]
    with pytest.raises(QuantError, match="linear_num_key_heads"):
        describe(config, entries, "config.json")
