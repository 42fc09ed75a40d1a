import json

import pytest

from lookalikes.auto_round import CONFIG as AUTO_ROUND
from quant.errors import QuantError
from quant.formats import compressed_tensors, detect, modelopt
from tests.quant.formats.test_compressed_tensors import PUBLISHED
from tests.quant.formats.test_modelopt import FLAT, NESTED, nested

QUASAR = {"quantization_format": "quasarnvfp4", "version": 1, "block_size": 16, "scale_policy": "mse"}


def model(tmp_path, config=None, hf_quant=None, quantize=None):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    for name, data in (("hf_quant_config.json", hf_quant), ("quantize_config.json", quantize)):
        if data is not None:
            (tmp_path / name).write_text(json.dumps(data))
    return tmp_path


@pytest.mark.parametrize(
    ("files", "name", "layout"),
    [
        ({"config": {"quantization_config": PUBLISHED}}, "compressed-tensors", compressed_tensors.LAYOUT),
        ({"config": {"compression_config": PUBLISHED}}, "compressed-tensors", compressed_tensors.LAYOUT),
        (
            {"config": {"text_config": {"quantization_config": PUBLISHED}}},
            "compressed-tensors",
            compressed_tensors.LAYOUT,
        ),
        ({"config": {"quantization_config": AUTO_ROUND}}, "auto-round", compressed_tensors.LAYOUT),
        ({"config": {"quantization_config": FLAT}}, "modelopt", modelopt.LAYOUT),
        ({"hf_quant": NESTED}, "modelopt", modelopt.LAYOUT),
        ({"config": {"quantization_config": FLAT}, "hf_quant": NESTED}, "modelopt", modelopt.LAYOUT),
        (
            {"config": {"quantization_config": PUBLISHED}, "quantize": QUASAR},
            "compressed-tensors",
            compressed_tensors.LAYOUT,
        ),
        ({"quantize": QUASAR}, "quasarnvfp4", compressed_tensors.LAYOUT),
        ({"quantize": {**QUASAR, "block_size": 32}}, "quasarnvfp4", compressed_tensors.LAYOUT),
    ],
)
def test_every_format_is_told_from_the_files_that_describe_it(tmp_path, files, name, layout):
    scheme = detect.detect(model(tmp_path, **files))

    assert scheme is not None
    assert (scheme.format, scheme.layout) == (name, layout)


def test_a_model_that_declares_no_quantization_has_no_scheme(tmp_path):
    assert detect.detect(model(tmp_path)) is None


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "mxfp4"}, r"quant_method: expected one of .*, got 'mxfp4' \(MXFP4: E2M1 weights"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt: expected 'e4m3', got 'e5m2'"),
        ({"quant_method": "fbgemm_fp8"}, r"got 'fbgemm_fp8' \(FP8, 8-bit float weights\)"),
        ({"quant_method": "gptq"}, r"got 'gptq' \(GPTQ, .*Choose an NVFP4"),
        ({"quant_method": "other"}, r"got 'other'\. Choose an NVFP4 or FP8 version"),
        ({}, r"got 'None'"),
        ([], r"quantization_config: expected an object, got \[\]"),
    ],
)
def test_another_format_is_refused_by_its_name(tmp_path, quantization, message):
    with pytest.raises(QuantError, match=message):
        detect.detect(model(tmp_path, {"quantization_config": quantization}))


def test_files_that_contradict_each_other_are_both_named(tmp_path):
    config = {"quantization_config": PUBLISHED}
    other = tmp_path / "other"
    other.mkdir()

    with pytest.raises(
        QuantError, match=r"quantize_config\.json: block size: expected 16 as in .*config\.json.*, got 32"
    ):
        detect.detect(model(tmp_path, config, quantize={**QUASAR, "block_size": 32}))
    with pytest.raises(
        QuantError,
        match=r"hf_quant_config\.json: tensor names: expected weight_global_scale as in .*, got weight_sc",
    ):
        detect.detect(model(other, config, hf_quant=nested()))


def test_two_files_complete_each_other(tmp_path):
    scheme = detect.detect(model(tmp_path, {"quantization_config": FLAT}, hf_quant=NESTED))

    assert scheme is not None
    assert len(scheme.ignore or ()) == 1 + 3
    assert scheme.kv_cache == "fp8"


def test_a_directory_without_config_json_is_refused(tmp_path):
    with pytest.raises(QuantError, match=r"config\.json is missing\. Name a model directory"):
        detect.detect(tmp_path)
