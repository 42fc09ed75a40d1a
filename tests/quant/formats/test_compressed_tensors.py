import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from quant.blockwise import global_divisor, quantize_matrix
from quant.errors import QuantError
from quant.formats.compressed_tensors import layout, read_config, read_linear, scheme, write_config, write_linear
from quant.tensor import NVFP4Tensor
from tests.quant.reference import E4M3_NANS

# What the public QUASAR checkpoints carry (producer and observers included), with 4-bit activations.
PUBLISHED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "producer": {"name": "qatfactory", "version": "0.1.0"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
                "observer": "memoryless_minmax",
            },
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": "local",
                "observer": "static_minmax",
            },
        }
    },
    "ignore": ["lm_head", "re:.*visual.*", "re:.*mtp.*"],
    "kv_cache_scheme": None,
}


def one_linear(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": torch.full((2, 8), 0x2A, dtype=torch.uint8),
        "weight_scale": torch.tensor([[1.5], [2.0]]).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0]),
    }
    return {**tensors, **changed}


def write_by_hand(path):
    """A W4A4 linear [1, 32] as bytes: codes 0..15 twice, scales 1.0 (0x38) and 2^-9 (0x01), divisor 8."""
    packed = bytes(low | (low + 1) << 4 for low in range(0, 16, 2)) * 2
    parts = [
        ("layer.weight_packed", "U8", [1, 16], packed),
        ("layer.weight_scale", "F8_E4M3", [1, 2], b"\x38\x01"),
        ("layer.weight_global_scale", "F32", [1], struct.pack("<f", 8.0)),
        ("layer.input_global_scale", "F32", [1], struct.pack("<f", 100.0)),
    ]
    header, data = {}, b""
    for name, dtype, shape, raw in sorted(parts, key=lambda part: part[1] != "F32"):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_file_written_by_hand_is_read_exactly(tmp_path):
    write_by_hand(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("layer."): t for name, t in load_file(tmp_path / "model.safetensors").items()}

    values = read_linear(tensors, "layer", 16).dequantize()

    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = np.array(magnitudes + [-m for m in magnitudes])
    np.testing.assert_array_equal(values[0, :16].numpy(), codes / 8)
    np.testing.assert_array_equal(values[0, 16:].numpy(), codes * 2.0**-9 / 8)
    assert values[0, 8].signbit(), "code 8 is -0"


@pytest.mark.parametrize("group_size", [16, 32])
def test_what_is_written_is_read_back_bit_for_bit(group_size):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    tensor = quantize_matrix(weight, group_size=group_size)

    written = write_linear(tensor, "layer")
    again = read_linear(written, "layer", group_size)

    assert {name: (t.dtype, tuple(t.shape)) for name, t in written.items()} == {
        name: (dtype, shape) for name, dtype, shape in layout(6, 64, group_size)
    }
    assert torch.equal(again.codes, tensor.codes)
    assert torch.equal(again.block_scales.view(torch.uint8), tensor.block_scales.view(torch.uint8))
    assert torch.equal(again.row_factor, tensor.row_factor)


@given(st.floats(1e-30, 1e30))
def test_the_factor_of_every_quantized_tensor_has_a_divisor(amax):
    factor = 1 / global_divisor(amax).reshape(1)
    tensor = NVFP4Tensor(torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 1).to(torch.float8_e4m3fn), factor, 16)

    assert torch.equal(1 / write_linear(tensor, "layer")["weight_global_scale"], factor)


def test_the_library_that_defines_the_format_reads_the_same_values():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    tensor = quantize_matrix(weight)
    config = QuantizationConfig.model_validate(write_config(16, ("lm_head",)))

    theirs = NVFP4PackedCompressor.decompress(write_linear(tensor, "layer"), config.config_groups["group_0"])["weight"]

    # The library works in bfloat16: 8 significant bits.
    torch.testing.assert_close(theirs.float(), tensor.dequantize(), rtol=2.0**-6, atol=0)


def test_a_fused_tensor_with_several_factors_cannot_be_written():
    tensor = NVFP4Tensor(
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.ones(2, 1).to(torch.float8_e4m3fn),
        torch.tensor([1.0, 2.0]),
        16,
    )

    with pytest.raises(ValueError, match="qkv_proj: expected one factor for all rows, got several"):
        write_linear(tensor, "qkv_proj")


def test_a_factor_that_is_no_float32_s_reciprocal_cannot_be_written():
    candidates = torch.arange(2**24 - 64, 2**24, dtype=torch.float32) / 2**24
    nearest = 1 / candidates
    held = torch.stack([1 / nearest.nextafter(nearest * side) for side in (0, 1, 2)])
    factor = candidates[~(held == candidates).any(0)][:1]
    assert len(factor), "just below 1, reciprocals lie twice as far apart"
    tensor = NVFP4Tensor(torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 1).to(torch.float8_e4m3fn), factor, 16)

    with pytest.raises(ValueError, match=r"layer: factor 0\.99999.* is not the reciprocal of any float32"):
        write_linear(tensor, "layer")


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize(
    "zeros",
    [
        {"weight_packed": torch.tensor([[0x80, 0x08] * 4] * 2, dtype=torch.uint8)},
        {"weight_scale": torch.zeros(2, 1).to(torch.float8_e4m3fn)},
    ],
)
def test_an_all_zero_weight_may_carry_any_global(value, zeros):
    tensors = one_linear(weight_global_scale=torch.tensor([value]), **zeros)

    assert not read_linear(tensors, "layer", 16).dequantize().any()


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_a_weight_that_is_not_zero_needs_a_positive_global(value):
    with pytest.raises(QuantError, match=r"q_proj\.weight_global_scale: expected a positive divisor, got"):
        read_linear(one_linear(weight_global_scale=torch.tensor([value])), "q_proj", 16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_packed": torch.zeros(2, 8)}, r"q_proj: codes: expected uint8 .* \(codes are weight_packed,"),
        ({"weight_scale": torch.zeros(2, 1, dtype=torch.uint8)}, r"q_proj: block_scales: expected float8_e4m3fn"),
        (
            {"weight_scale": torch.zeros(2, 2).to(torch.float8_e4m3fn)},
            r"block_scales: expected .*\[2, 1\].*got .*\[2, 2\]",
        ),
        (
            {"weight_global_scale": torch.ones(2)},
            r"q_proj\.weight_global_scale: expected torch\.float32 \[1\], got .* \[2\]",
        ),
        ({"weight_global_scale": torch.ones(1).half()}, r"weight_global_scale: expected .*, got torch\.float16 \[1\]"),
    ],
)
def test_a_wrong_tensor_is_named_with_expected_and_got(changed, message):
    with pytest.raises(QuantError, match=message):
        read_linear(one_linear(**changed), "q_proj", 16)


@pytest.mark.parametrize("code", E4M3_NANS)
def test_a_block_scale_that_is_nan_is_named_with_its_index(code):
    scale = torch.tensor([[0x38], [code]], dtype=torch.uint8).view(torch.float8_e4m3fn)

    with pytest.raises(QuantError, match=r"q_proj\.weight_scale\[1, 0\]: expected a number, got NaN"):
        read_linear(one_linear(weight_scale=scale), "q_proj", 16)


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_a_missing_tensor_is_named(suffix):
    tensors = one_linear()
    del tensors[suffix]

    with pytest.raises(QuantError, match=rf"q_proj\.{suffix} is missing"):
        read_linear(tensors, "q_proj", 16)


def test_a_scalar_global_is_read_like_one_of_one_element():
    scalar = read_linear(one_linear(weight_global_scale=torch.tensor(4.0)), "layer", 16)

    assert scalar.row_factor.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("group_size", [16, 32])
def test_the_config_written_is_read_back(group_size):
    config = scheme(group_size, ("lm_head", "re:.*router.*"))

    assert config.ignore is not None
    assert read_config(write_config(config.group_size, config.ignore), "config.json") == config


@pytest.mark.parametrize("strategy", ["tensor_group", "group"])
def test_published_configs_are_read(strategy):
    published = json.loads(json.dumps(PUBLISHED))
    published["config_groups"]["group_0"]["weights"]["strategy"] = strategy

    assert read_config(published, "config.json") == scheme(16, ("lm_head", "re:.*visual.*", "re:.*mtp.*"), w4a4=True)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("quant_method",), "gptq", r"quant_method: expected 'compressed-tensors', got 'gptq'"),
        (("format",), "mxfp4-pack-quantized", r"format: expected 'nvfp4-pack-quantized' or .*, got 'mxfp4"),
        (("format",), 4, r"format: expected a string, got 4"),
        (("ignore",), "lm_head", r"ignore: expected a list, got 'lm_head'"),
        (("ignore",), [1], r"ignore: expected names, got \[1\]"),
        (("config_groups",), {}, r"config_groups: expected one NVFP4 group_size for all, got no group"),
        (("config_groups", "group_0"), None, r"config_groups: group_0: expected an object, got null"),
        (
            ("config_groups", "group_0", "targets"),
            [],
            r"group_0\.targets: expected classes, names or patterns, got \[\]",
        ),
        (("config_groups", "group_0", "weights", "num_bits"), 3, r"weights\.num_bits: expected 4 or 8, got 3"),
        (("config_groups", "group_0", "weights", "num_bits"), 8, r"weights\.strategy: expected 'tensor' or"),
        (("config_groups", "group_0", "weights", "type"), "int", r"weights\.type: expected 'float', got 'int'"),
        (("config_groups", "group_0", "weights", "strategy"), "channel", r"expected 'tensor_group' or 'group', got"),
        (("config_groups", "group_0", "weights", "group_size"), 128, r"group_size: expected 16 or 32, got 128"),
        (
            ("config_groups", "group_0", "weights", "scale_dtype"),
            "torch.uint8",
            r"scale_dtype: expected .*got 'torch.uint8'",
        ),
        (("config_groups", "group_0", "weights", "dynamic"), True, r"dynamic: expected false, got true"),
    ],
)
def test_a_config_that_is_not_nvfp4_is_refused_naming_the_key(path, value, message):
    broken = json.loads(json.dumps(PUBLISHED))
    parent = broken
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value

    with pytest.raises(QuantError, match=rf"^config\.json: .*{message}"):
        read_config(broken, "config.json")


def test_groups_that_differ_are_refused():
    mixed = json.loads(json.dumps(PUBLISHED))
    mixed["config_groups"]["group_1"] = json.loads(json.dumps(mixed["config_groups"]["group_0"]))
    mixed["config_groups"]["group_1"]["weights"]["group_size"] = 32

    with pytest.raises(QuantError, match="config_groups: expected one NVFP4 group_size for all, got 16 and 32"):
        read_config(mixed, "config.json")


FP8_GROUP: dict[str, Any] = {
    "format": "float-quantized",
    "targets": ["re:.*self_attn.*", "re:.*linear_attn.*"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


def mixed(**fp8):
    config = json.loads(json.dumps(PUBLISHED))
    config["format"] = "mixed-precision"
    config["config_groups"]["group_0"]["input_activations"] = None
    config["config_groups"]["group_1"] = {**json.loads(json.dumps(FP8_GROUP)), **fp8}
    return config


def test_a_mixed_config_names_both_kinds_and_leaves_the_linears_to_their_tensors():
    read = read_config(mixed(), "config.json")

    assert (read.elements, read.group_size, read.w4a4, read.w8a8) == (("E2M1", "E4M3"), 16, False, True)
    assert read.by_tensors
    assert read.ignore is None  # groups with targets by name: a module in neither is in 16 bits


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "float", "dynamic": True}])
def test_a_float_quantized_config_is_read(strategy, activations):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights["block_structure"] = [128, 128] if strategy == "block" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}

    read = read_config({**config, "config_groups": {"group_0": group}}, "config.json")

    assert (read.elements, read.w8a8, read.ignore) == (("E4M3",), activations is not None, ("lm_head",))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"type": "int"}, r"group_1\.weights\.type: expected 'float', got 'int'"),
        ({"symmetric": False}, r"weights\.symmetric: expected true, got false"),
        ({"dynamic": True}, r"weights\.dynamic: expected false, got true"),
        ({"strategy": "group"}, r"weights\.strategy: expected 'tensor' or 'channel' or 'block', got 'group'"),
        ({"block_structure": [64, 64]}, r"weights\.block_structure: expected null or \[128, 128\], got \[64, 64\]"),
    ],
)
def test_fp8_of_another_kind_is_refused_naming_the_key(weights, message):
    with pytest.raises(QuantError, match=message):
        read_config(mixed(weights={**FP8_GROUP["weights"], **weights}), "config.json")
