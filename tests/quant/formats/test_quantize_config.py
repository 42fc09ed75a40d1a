import json

import pytest

from quant.errors import QuantError
from quant.formats import quantize_config
from quant.formats.quantize_config import QuantizeConfig

VALID = {"quantization_format": "quasarnvfp4", "version": 1, "block_size": 16, "scale_policy": "mse"}


@pytest.mark.parametrize(
    "config",
    [
        QuantizeConfig(16, "mse"),
        QuantizeConfig(32, "maxabs"),
        QuantizeConfig(16, "other"),
        QuantizeConfig(16, "quasar", "0a1b"),
    ],
)
def test_what_is_written_is_read_back(tmp_path, config):
    quantize_config.write(tmp_path, config)

    assert quantize_config.read(tmp_path) == config


def test_the_file_has_the_documented_keys(tmp_path):
    quantize_config.write(tmp_path, QuantizeConfig(16, "mse"))

    assert json.loads((tmp_path / "quantize_config.json").read_text()) == VALID


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantization_format", "gptq", "quantization_format: expected 'quasarnvfp4', got 'gptq'"),
        ("quantization_format", None, "quantization_format: expected a string, got null"),
        ("version", 2, "version: expected 1, got 2"),
        ("version", True, "version: expected an integer, got true"),
        ("block_size", 64, "block_size: expected 16 or 32, got 64"),
        ("block_size", "16", "block_size: expected an integer, got '16'"),
        ("block_size", 16.0, "block_size: expected an integer, got 16.0"),
        ("scale_policy", "", "scale_policy: expected a name, got ''"),
        ("scale_policy", 3, "scale_policy: expected a string, got 3"),
        (
            "blocksize",
            16,
            "blocksize: expected one of quantization_format, version, block_size, scale_policy, calibration_sha256, "
            "calibration_windows, calibration_window_tokens, calibration_seed, source, voltserve_version, "
            "got an unknown key",
        ),
    ],
)
def test_a_malformed_value_is_named_with_expected_got_and_remedy(tmp_path, key, value, message):
    path = tmp_path / "quantize_config.json"
    path.write_text(json.dumps({**VALID, key: value}))

    with pytest.raises(QuantError) as caught:
        quantize_config.read(tmp_path)

    assert caught.value.problem.startswith(f"{path}: {message}")
    assert "voltserve" in caught.value.remedy


@pytest.mark.parametrize("key", VALID)
def test_a_missing_key_is_named(tmp_path, key):
    (tmp_path / "quantize_config.json").write_text(json.dumps({name: VALID[name] for name in VALID if name != key}))

    with pytest.raises(QuantError, match=rf"quantize_config\.json: {key}: expected (a string|an integer), got nothing"):
        quantize_config.read(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(QuantError, match=r"quantize_config\.json is missing"):
        quantize_config.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"quasarnvfp4"'])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    (tmp_path / "quantize_config.json").write_bytes(content)

    with pytest.raises(QuantError, match=r"quantize_config\.json: expected a JSON object, got"):
        quantize_config.read(tmp_path)
