import struct

import pytest
import torch
from safetensors.torch import load_file

from quant.convert import convert_checkpoint
from quant.errors import QuantError
from quant.formats import registry
from quant.formats.linear import read_linear
from quant.progress import Progress
from quant.verify import verify
from tests.quant.checkpoints import (
    COMPRESSED_TENSORS,
    DOWN,
    FIRST,
    LINEARS,
    MODELOPT,
    SECOND,
    compressed_tensors_linear,
    modelopt_linear,
    read_json,
    read_shard,
    write_json,
    write_model,
    write_safetensors,
)
from tests.quant.files import names_in
from tests.quant.test_gguf_nvfp4_model import tiny_tensors, write_by_hand
from tests.quant.tiny_gguf import write_gguf

SOURCES = {
    "compressed-tensors": (compressed_tensors_linear, COMPRESSED_TENSORS),
    "modelopt": (modelopt_linear, MODELOPT),
}


def values(model):
    """Every linear's weight as it is read, bit for bit, and every other tensor."""
    report = verify(model)
    assert report.ok, report.findings
    tensors = {name: tensor for shard in (FIRST, SECOND) for name, tensor in load_file(model / shard).items()}
    weights = {}
    for module, (*_, group_size, layout) in report.modules.nvfp4.items():
        own = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")}
        weights[module] = read_linear(layout, own, module, group_size).dequantize().view(torch.int32)
    others = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in weights}
    return weights | others


def change(model, name, dtype, shape, raw, shard=SECOND):
    write_safetensors(model / shard, read_shard(model / shard) | {name: (dtype, shape, raw)})


@pytest.mark.parametrize("target", registry.targets())
@pytest.mark.parametrize("source", SOURCES)
def test_every_value_survives_minus_zero_included(tmp_path, source, target):
    model = write_model(tmp_path / "model", *SOURCES[source])

    report = convert_checkpoint(model, tmp_path / "out", target)

    expected, got = values(model), values(tmp_path / "out")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    assert any((tensor == -(2**31)).any() for name, tensor in expected.items() if name == DOWN), "-0 is among them"
    assert (report.source_format, report.linears, report.rounded) == (source, 14, ())
    scheme = verify(tmp_path / "out").scheme
    assert scheme is not None
    assert scheme.layout == registry.targets()[target].layout
    assert scheme.w4a4 == (source == "modelopt")


@pytest.mark.parametrize("target", registry.targets())
def test_there_and_back_is_the_same_bytes(tmp_path, target):
    model = write_model(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        for name in LINEARS:
            divisor = struct.pack("<f", float(torch.rand(1, generator=generator) * 10**4 + 1e-3))
            change(
                model, f"model.layers.{number}.{name}.weight_global_scale", "F32", [1], divisor, (FIRST, SECOND)[number]
            )

    convert_checkpoint(model, tmp_path / "there", target)
    convert_checkpoint(tmp_path / "there", tmp_path / "back", "compressed-tensors")

    for name, tensor in values(model).items():
        assert torch.equal(tensor, values(tmp_path / "back")[name]), name


def test_the_files_beside_the_weights_are_taken_along_but_the_old_configs(tmp_path):
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    (model / "LICENSE").write_text("free")
    verify(model, manifest="write")

    convert_checkpoint(model, tmp_path / "out", "quasarnvfp4")

    assert names_in(tmp_path / "out") == sorted(
        {*names_in(model), "quantize_config.json"} - {"hf_quant_config.json", "SHA256SUMS"}
    )
    assert read_json(tmp_path / "out" / "quantize_config.json")["scale_policy"] == "converted from modelopt"


def test_a_modelopt_config_lists_by_name_what_stays_in_16_bits(tmp_path):
    convert_checkpoint(write_model(tmp_path / "model"), tmp_path / "out", "modelopt")

    quantization = read_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]
    assert quantization["quant_algo"] == "W4A16_NVFP4"
    assert quantization["exclude_modules"] == ["lm_head", "model.embed_tokens"]


def test_a_multiplier_that_no_divisor_stands_for_is_refused_and_rounded_only_on_demand(tmp_path):
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    numbers = torch.arange(2**24 - 64, 2**24, dtype=torch.float32) / 2**24
    nearest = 1 / numbers
    held = torch.stack([1 / nearest.nextafter(nearest * side) for side in (0, 1, 2)])
    number = numbers[~(held == numbers).any(0)][0]
    change(model, f"{DOWN}.weight_scale_2", "F32", [], struct.pack("<f", float(number)))

    message = rf"got 1 of 28 that it cannot, as no float32 divisor .*: {DOWN}\.weight_scale_2\. .*--nearest"
    with pytest.raises(QuantError, match=message):
        convert_checkpoint(model, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()

    report = convert_checkpoint(model, tmp_path / "out", "compressed-tensors", nearest=True)

    assert report.rounded == (f"{DOWN}.weight_scale_2",)
    (stored,) = struct.unpack("<f", read_shard(tmp_path / "out" / SECOND)[f"{DOWN}.weight_global_scale"][2])
    assert abs(1 / stored - float(number)) <= 1.2e-7 * float(number)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_an_all_zero_weight_may_carry_any_global_and_gets_1(tmp_path, value):
    model = write_model(tmp_path / "model")
    rows, columns = LINEARS["mlp.down_proj"]
    change(model, f"{DOWN}.weight_packed", "U8", [rows, columns // 2], b"\x80" * (rows * columns // 2))
    change(model, f"{DOWN}.weight_global_scale", "F32", [1], struct.pack("<f", value))

    convert_checkpoint(model, tmp_path / "out", "modelopt")

    assert read_shard(tmp_path / "out" / SECOND)[f"{DOWN}.weight_scale_2"] == ("F32", [], struct.pack("<f", 1.0))


def test_a_global_that_is_no_positive_number_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    change(model, f"{DOWN}.weight_global_scale", "F32", [1], struct.pack("<f", -1.0))

    with pytest.raises(QuantError, match=rf"{DOWN}\.weight_global_scale: expected a positive number, got -1\.0"):
        convert_checkpoint(model, tmp_path / "out", "modelopt")


def awq_linear(name, rows, columns):
    return modelopt_linear(name, rows, columns) | {
        f"{name}.pre_quant_scale": ("BF16", [columns], b"\x80\x3f" * columns)
    }


def as_awq(model):
    config = read_json(model / "hf_quant_config.json")
    config["quantization"]["quant_algo"] = "NVFP4_AWQ"
    write_json(model / "hf_quant_config.json", config)
    return model


def test_pre_quant_scales_are_kept_by_modelopt_and_refused_by_the_others(tmp_path):
    model = as_awq(write_model(tmp_path / "model", awq_linear, MODELOPT))

    convert_checkpoint(model, tmp_path / "out", "modelopt")

    scheme = verify(tmp_path / "out").scheme
    assert scheme is not None
    assert scheme.pre_quant_scale
    assert values(tmp_path / "out").keys() == values(model).keys()
    with pytest.raises(QuantError, match=r"14 layers with a pre_quant_scale \(NVFP4_AWQ\): only ModelOpt's format"):
        convert_checkpoint(model, tmp_path / "other", "compressed-tensors")


def test_block_size_32_has_no_place_in_modelopt(tmp_path):
    config = read_json(write_model(tmp_path / "model") / "config.json")["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["group_size"] = 32
    model = write_model(
        tmp_path / "model", lambda name, rows, columns: compressed_tensors_linear(name, rows, columns, 32), config
    )

    with pytest.raises(QuantError, match=r"block size 32: ModelOpt's NVFP4 has 16 weights per block scale"):
        convert_checkpoint(model, tmp_path / "out", "modelopt")
    convert_checkpoint(model, tmp_path / "out", "quasarnvfp4")
    assert read_json(tmp_path / "out" / "quantize_config.json")["block_size"] == 32


def test_a_broken_model_and_a_16_bit_one_are_refused(tmp_path):
    model = write_model(tmp_path / "model")
    (model / SECOND).unlink()
    with pytest.raises(QuantError, match=rf"{SECOND}: expected a file, .*See `voltserve verify`"):
        convert_checkpoint(model, tmp_path / "out", "modelopt")

    def plain(name, rows, columns):
        return {f"{name}.weight": ("F16", [rows, columns], bytes(2 * rows * columns))}

    with pytest.raises(QuantError, match="expected an NVFP4 model, got a 16-bit one"):
        convert_checkpoint(write_model(tmp_path / "plain", plain, None), tmp_path / "out", "modelopt")
    with pytest.raises(QuantError, match="format: expected one of compressed-tensors, modelopt, quasarnvfp4, got 'x'"):
        convert_checkpoint(model, tmp_path / "out", "x")


def test_progress_reaches_all_bytes(tmp_path):
    seen: list[Progress] = []

    convert_checkpoint(write_model(tmp_path / "model"), tmp_path / "out", "modelopt", on_progress=seen.append)

    assert seen[-1].done == seen[-1].total > 0


def test_a_gguf_file_with_nvfp4_becomes_a_modelopt_directory(tmp_path):
    path = write_by_hand(tmp_path, tiny_tensors()[0])

    report = convert_checkpoint(path, tmp_path / "out", "modelopt")

    assert (report.source_format, report.linears) == ("gguf", 12)
    assert verify(tmp_path / "out").ok
    with pytest.raises(QuantError, match="expected modelopt as the format for a GGUF file, got 'quasarnvfp4'"):
        convert_checkpoint(path, tmp_path / "other", "quasarnvfp4")


def test_a_gguf_file_without_nvfp4_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")

    with pytest.raises(QuantError, match=r"expected NVFP4 tensors \(type 40\), got none"):
        convert_checkpoint(tmp_path / "tiny.gguf", tmp_path / "out", "modelopt")
