"""The card of a quantized model says what is known of this one, and nothing that its source's said of other weights."""

import json

import pytest
import yaml

from quant.calibrate import CalibrationSettings
from quant.calibration_text import Text
from quant.methods import Method
from quant.model_card import model_name
from quant.quantize import quantize_checkpoint
from tests.quant.tiny_model import TEXT, tiny_model

CARD = """---
license: other
license_name: tongyi
license_link: LICENSE
language: [en, zh]
datasets: [secret]
---
# Great model
Scores 99 in bfloat16.
"""


@pytest.fixture
def source(tmp_path):
    return tiny_model(tmp_path / "my-model")


def quantized(source, **options):
    out = source.parent / "out"
    quantize_checkpoint(source, out, **options)
    text = (out / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    return out, yaml.safe_load(front), body


def test_the_source_s_card_is_not_the_result_s(source):
    (source / "README.md").write_text(CARD)
    (source / "LICENSE").write_text("Tongyi licence\n")
    out, front, body = quantized(source)
    assert front["license"] == "other"
    assert front["license_name"] == "tongyi"
    assert front["language"] == ["en", "zh"]
    assert front["base_model"] == "my-model"
    assert "datasets" not in front
    assert "99" not in body
    assert "tongyi (LICENSE)" in body
    assert "`LICENSE`" in body
    assert (out / "LICENSE").exists()
    assert "voltserve serve --model DIR" in body
    assert "mse, 16 weights per block scale" in body


@pytest.mark.parametrize("name", ["readme.md", "README.MD", "Readme.txt"])
def test_a_card_by_another_spelling_is_not_copied_either(source, name):
    (source / name).write_text("# Great model")
    out, _, body = quantized(source)
    assert "Great" not in body
    assert [path.name for path in out.iterdir() if path.name.lower().startswith("readme")] == ["README.md"]


def test_the_licence_file_speaks_where_no_card_does_and_nothing_is_made_up(source):
    (source / "LICENSE.txt").write_text("\n  Apache License\n")
    _, front, body = quantized(source)
    assert "license" not in front
    assert 'begins: "Apache License"' in body


def test_without_either_the_licence_is_unknown(source):
    (source / "README.md").write_text("---\n: not: yaml: [\n---\n")
    _, front, body = quantized(source)
    assert "Unknown" in body
    assert "license" not in front


def test_card_and_record_say_how_to_make_it_again(source):
    text = Text(TEXT, "/home/someone/private/foxes.txt")
    settings = CalibrationSettings(text, windows=5, window_tokens=32, seed=7)
    out, _, body = quantized(source, method=Method("quasar"), calibration=settings)
    record = json.loads((out / "quantize_config.json").read_text())
    assert record.pop("voltserve_version")
    assert record == {
        "quantization_format": "quasarnvfp4",
        "version": 1,
        "block_size": 16,
        "scale_policy": "quasar",
        "calibration_sha256": text.sha256,
        "calibration_windows": 5,
        "calibration_window_tokens": 32,
        "calibration_seed": 7,
        "source": "my-model",
    }
    assert "5 windows of 32 tokens, drawn with seed 7 from foxes.txt" in body
    assert "someone" not in body
    assert text.sha256 in body


def test_a_model_of_the_hub_s_cache_has_its_name_there(tmp_path):
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de289a04d12100db370d81485cdf75e47ca"
    snapshot.mkdir(parents=True)
    assert model_name(snapshot) == "Qwen/Qwen3-0.6B"
    assert model_name(tmp_path) == tmp_path.name
