"""A format made up here, known from its one entry to everything that handles formats."""

import json
import struct
from pathlib import Path

import pytest
import torch

from quant.convert import convert_checkpoint
from quant.errors import QuantError
from quant.evaluate.local import dequantized
from quant.formats import registry
from quant.formats.detect import declared, detect, is_ours
from quant.formats.format import Format, Written
from quant.formats.scheme import LinearLayout, Scheme
from quant.inspect import inspect_model
from quant.safetensors_file import open_checkpoint
from quant.verify import verify
from tests.quant.checkpoints import DOWN, compressed_tensors_linear, read_json, write_json, write_model

LAYOUT = LinearLayout("toy_codes", "toy_scales", "toy_multiplier", "toy_input", divides=False)


def _read(data, source):
    return Scheme("toy", source, LAYOUT, data["block"], None)


TOY = Format(
    name="toy",
    maker="Toy",
    aliases=("toy_v2",),
    layout=LAYOUT,
    files=("toy.json",),
    is_config=lambda data: data.get("quant_method") == "toy",
    claims=lambda data: "block" in data,
    read=_read,
    write=lambda scheme, kept: Written(
        {"quant_method": "toy", "block": scheme.group_size}, {"toy.json": {"block": scheme.group_size, "kept": [*kept]}}
    ),
    group_sizes=(16,),
)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, TOY))


def scheme_of(directory: Path) -> Scheme:
    scheme = detect(directory)
    assert scheme is not None
    return scheme


def toy_linear(name, rows, columns):
    codes, scales, _ = compressed_tensors_linear(name, rows, columns).values()
    multiplier: tuple[str, list[int], bytes] = ("F32", [], struct.pack("<f", 1 / 64))
    return {f"{name}.toy_codes": codes, f"{name}.toy_scales": scales, f"{name}.toy_multiplier": multiplier}


def toy_model(directory):
    return write_model(directory, toy_linear, {"quant_method": "toy", "block": 16})


def test_every_format_has_a_name_and_files_of_its_own():
    names = registry.engine_names()
    files = [name for _, name in registry.own_files()]

    assert len(set(names)) == len(names)
    assert len(set(files)) == len(files)


def test_a_new_format_is_detected_verified_and_inspected(tmp_path, toy):
    model = toy_model(tmp_path / "model")

    assert detect(model) == Scheme("toy", "", LAYOUT, 16, None)
    assert verify(model).ok
    summary = inspect_model(model)
    assert (summary.format, summary.linears) == ("toy", 14)


def test_its_own_file_describes_a_model_too(tmp_path, toy):
    model = write_model(tmp_path / "model", toy_linear, None)
    write_json(model / "toy.json", {"block": 16})

    assert scheme_of(model).format == "toy"
    assert declared(model, {}) == {"block": 16}


def test_its_broken_models_are_broken_to_verify(tmp_path, toy):
    model = write_model(
        tmp_path / "model",
        lambda *args: {key: value for key, value in toy_linear(*args).items() if not key.endswith("toy_scales")},
        {"quant_method": "toy", "block": 16},
    )

    report = verify(model, "headers")

    assert not report.ok
    assert any(finding.tensor == f"{DOWN}.toy_scales" for finding in report.findings)


def test_its_weights_are_read(tmp_path, toy):
    theirs = toy_model(tmp_path / "theirs")
    ours = write_model(tmp_path / "ours")

    values = dequantized(open_checkpoint(theirs), scheme_of(theirs))[0]
    expected = dequantized(open_checkpoint(ours), scheme_of(ours))[0]

    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_models_are_converted_to_it_and_from_it(tmp_path, toy):
    model = write_model(tmp_path / "model")

    convert_checkpoint(model, tmp_path / "toy", "toy")
    convert_checkpoint(tmp_path / "toy", tmp_path / "back", "compressed-tensors")

    assert read_json(tmp_path / "toy" / "toy.json")["block"] == 16
    assert scheme_of(tmp_path / "toy").format == "toy"
    assert verify(tmp_path / "toy").ok
    assert not (tmp_path / "back" / "toy.json").exists()
    assert verify(tmp_path / "back").ok
    with pytest.raises(QuantError, match="expected one of compressed-tensors, modelopt, quasarnvfp4, toy, got 'x'"):
        convert_checkpoint(model, tmp_path / "x", "x")


def test_convert_offers_it(toy):
    from server.cli.models import format_choice

    assert list(format_choice().choices) == ["compressed-tensors", "modelopt", "quasarnvfp4", "toy"]


def test_the_engine_claims_it(toy):
    from engine.layers.quantization import NAME, QuasarNvfp4Config

    config = {"quant_method": "toy", "block": 16}

    assert is_ours(config)
    for asked in (None, "toy", "toy_v2", NAME):
        assert QuasarNvfp4Config.override_quantization_method(config, asked) == NAME
    assert QuasarNvfp4Config.override_quantization_method({"quant_method": "toy"}, None) is None
    scheme = QuasarNvfp4Config.from_config(json.loads(json.dumps(config))).config
    assert scheme is not None
    assert scheme.layout == LAYOUT


def test_its_scalars_are_no_overflow(toy):
    from engine.weights.overflow import OverflowCheck

    check = OverflowCheck(torch.float16)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model.weight.data.fill_(torch.inf)

    check.look_at(f"{DOWN}.toy_multiplier", torch.tensor(1e6), "file")
    check.judge(model)
    check.look_at(f"{DOWN}.other", torch.tensor(1e6), "file")
    with pytest.raises(QuantError, match="float16 cannot hold"):
        check.judge(model)
