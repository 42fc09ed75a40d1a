import re
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quant.errors import QuantError
from quant.formats import compressed_tensors, modelopt
from quant.formats.linear import read_linear, write_linear
from tests.quant.checkpoints import write_safetensors

# As hf_quant_config.json of published models says it.
NESTED: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate"],
    },
}
# As config.json mirrors it.
FLAT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}


def nested(**changed: object) -> dict[str, object]:
    quantization = {key: value for key, value in (NESTED["quantization"] | changed).items() if value is not ...}
    return {"producer": NESTED["producer"], "quantization": quantization}


def test_a_file_written_by_hand_is_read_exactly(tmp_path):
    """A linear [1, 32]: codes 0..15 twice, scales 1.0 (0x38) and 2^-9 (0x01), multiplier 1/8."""
    packed = bytes(low | (low + 1) << 4 for low in range(0, 16, 2)) * 2
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "layer.weight": ("U8", [1, 16], packed),
            "layer.weight_scale": ("F8_E4M3", [1, 2], b"\x38\x01"),
            "layer.weight_scale_2": ("F32", [], struct.pack("<f", 0.125)),
            "layer.input_scale": ("F32", [], struct.pack("<f", 100.0)),
        },
    )
    tensors = {name.removeprefix("layer."): t for name, t in load_file(tmp_path / "model.safetensors").items()}

    values = read_linear(modelopt.LAYOUT, tensors, "layer", 16).dequantize()

    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = np.array(magnitudes + [-m for m in magnitudes])
    np.testing.assert_array_equal(values[0, :16].numpy(), codes / 8)
    np.testing.assert_array_equal(values[0, 16:].numpy(), codes * 2.0**-9 / 8)
    assert values[0, 8].signbit(), "code 8 is -0"


def test_what_is_written_is_read_back_bit_for_bit():
    tensors = {
        "weight": torch.arange(16, dtype=torch.uint8).view(2, 8),
        "weight_scale": torch.tensor([[1.5], [448.0]]).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor([0.99999994]),
    }

    written = write_linear(modelopt.LAYOUT, read_linear(modelopt.LAYOUT, tensors, "layer", 16), "layer")

    for name, tensor in tensors.items():
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_a_weight_that_is_not_zero_needs_a_positive_multiplier(value):
    tensors = {
        "weight": torch.ones(1, 8, dtype=torch.uint8),
        "weight_scale": torch.ones(1, 1).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(value),
    }

    with pytest.raises(QuantError, match=r"q_proj\.weight_scale_2: expected a positive multiplier, got"):
        read_linear(modelopt.LAYOUT, tensors, "q_proj", 16)


def test_the_nested_config_is_read():
    scheme = modelopt.read_config(NESTED, "hf_quant_config.json")

    assert (scheme.group_size, scheme.w4a4, scheme.kv_cache, scheme.layout) == (16, True, "fp8", modelopt.LAYOUT)
    assert not scheme.pre_quant_scale


def test_the_flat_config_says_the_same():
    nested_scheme = modelopt.read_config(nested(exclude_modules=["lm_head"]), "x")

    assert modelopt.read_config(FLAT, "x") == nested_scheme


@pytest.mark.parametrize(
    ("module", "ignored"),
    [
        ("lm_head", True),
        ("language_model.lm_head", True),
        ("model.layers.0.self_attn.q_proj", True),
        ("language_model.model.layers.0.self_attn.o_proj", True),
        ("model.layers.10.self_attn.q_proj", False),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.gate.0", True),
    ],
)
def test_wildcards_match_at_module_boundaries(module, ignored):
    scheme = modelopt.read_config(NESTED, "x")

    assert any(re.match(pattern.removeprefix("re:"), module) for pattern in scheme.ignore or ()) == ignored


def test_without_exclude_modules_the_tensors_decide():
    assert modelopt.read_config(nested(exclude_modules=...), "x").ignore is None


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (NESTED, True),
        (FLAT, True),
        ({"quantization": {"quant_algo": "NVFP4"}}, True),
        ({"quant_algo": "NVFP4", "ignore": []}, True),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, True),
        ({"quant_method": "compressed-tensors", "quant_algo": "NVFP4"}, False),
        ({"quant_method": "fp8"}, False),
        ({}, False),
    ],
)
def test_a_config_is_recognised_even_without_a_quant_method(data, expected):
    assert modelopt.is_config(data) == expected


def test_weight_only_and_awq_algorithms_are_read():
    assert not modelopt.read_config(nested(quant_algo="W4A16_NVFP4"), "x").w4a4
    assert modelopt.read_config(nested(quant_algo="nvfp4_awq"), "x").pre_quant_scale


def test_mixed_precision_is_refused_with_the_layers_that_are_not_supported():
    layers: dict[str, dict[str, Any]] = {f"model.layers.{n}.mlp.up_proj": {"quant_algo": "W4A8_AWQ"} for n in range(10)}
    layers["model.layers.0.mlp.down_proj"] = {"quant_algo": "NVFP4", "group_size": 16}

    with pytest.raises(QuantError) as caught:
        modelopt.read_config(nested(quant_algo="MIXED_PRECISION", quantized_layers=layers), "hf_quant_config.json")

    assert caught.value.problem.startswith(
        "hf_quant_config.json: MIXED_PRECISION: expected NVFP4 and FP8 layers only, got 10 of 11 layers in other "
        "formats: model.layers.0.mlp.up_proj (W4A8_AWQ), "
    )
    assert caught.value.problem.endswith("model.layers.7.mlp.up_proj (W4A8_AWQ) and 2 more")


def test_mixed_precision_in_which_all_layers_are_nvfp4_is_read():
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}

    assert not modelopt.read_config(nested(quant_algo="MIXED_PRECISION", quantized_layers=layers), "x").w4a4


def test_mixed_precision_of_nvfp4_and_fp8_is_read():
    layers = {
        "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }

    read = modelopt.read_config(nested(quant_algo="MIXED_PRECISION", quantized_layers=layers), "x")

    assert (read.elements, read.w4a4, read.w8a8, read.group_size) == (("E2M1", "E4M3"), False, True, 16)


@pytest.mark.parametrize(
    ("algorithm", "w8a8"), [("FP8", True), ("FP8_PER_CHANNEL_PER_TOKEN", True), ("FP8_PB_WO", False)]
)
def test_fp8_exports_are_read(algorithm, w8a8):
    read = modelopt.read_config(nested(quant_algo=algorithm, group_size=None), "x")

    assert (read.elements, read.w4a4, read.w8a8) == (("E4M3",), False, w8a8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quant_algo": "INT8_SQ"}, "quant_algo: expected one of NVFP4, .*, MIXED_PRECISION, got 'INT8_SQ'"),
        ({"quant_algo": "W4A8_MXFP4_FP8"}, "quant_algo: expected one of .*got 'W4A8_MXFP4_FP8'"),
        ({"quant_algo": ...}, "quant_algo: expected NVFP4, got nothing"),
        ({"quant_algo": 4}, "quant_algo: expected a string, got 4"),
        ({"group_size": 64}, "group_size: expected 16 or 32, got 64"),
        ({"exclude_modules": "lm_head"}, "exclude_modules: expected a list, got 'lm_head'"),
        ({"exclude_modules": [1]}, r"exclude_modules: expected names, got \[1\]"),
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo: expected FP8, NVFP4 or null, got 'INT8'"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers: expected an object, got nothing"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "MIXED_PRECISION: .*got 0 of 0 layers in other formats: none",
        ),
    ],
)
def test_a_config_that_is_not_nvfp4_is_refused_naming_the_key(changed, message):
    with pytest.raises(QuantError, match=rf"^hf_quant_config\.json: {message}"):
        modelopt.read_config(nested(**changed), "hf_quant_config.json")


def test_the_same_weight_in_both_layouts_has_the_same_values():
    tensor = read_linear(
        modelopt.LAYOUT,
        {
            "weight": torch.arange(256, dtype=torch.uint8).view(2, 128),
            "weight_scale": torch.arange(32).view(2, 16).to(torch.uint8).view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(0.25),
        },
        "layer",
        16,
    )

    other = write_linear(compressed_tensors.LAYOUT, tensor, "layer")

    assert other["weight_global_scale"].tolist() == [4.0]
    again = read_linear(compressed_tensors.LAYOUT, other, "layer", 16).dequantize()
    assert torch.equal(again.view(torch.int32), tensor.dequantize().view(torch.int32)), "-0 included"
