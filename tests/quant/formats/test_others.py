from __future__ import annotations

from typing import Any

import pytest

from quant.formats.others import OTHERS, meets


def compressed(**weights: Any) -> dict[str, Any]:
    activations = weights.pop("activations", None)
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": said, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
RUNS = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None, "gptq"),
    "GPTQ, 8 bits": ({"quant_method": "gptq", "bits": 8}, None, "gptq"),
    "GPTQ, asked for": ({"quant_method": "gptq", "bits": 4}, "gptq", "gptq"),
    "AWQ": ({"quant_method": "awq", "bits": 4, "zero_point": True}, None, "awq"),
    "AWQ's old key": ({"quant_method": "awq", "w_bit": 4}, "awq", "awq"),
    "AutoRound in GPTQ's layout": (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, None, "gptq"),
    "AutoRound in AWQ's layout": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, None, "awq"),
    "compressed-tensors int4": (compressed(), None, "compressed-tensors"),
    "compressed-tensors int8": (compressed(num_bits=8), None, "compressed-tensors"),
    "GGUF": (None, "gguf", "gguf"),
}
REFUSED = {
    "GPTQ by Marlin": ({"quant_method": "gptq", "bits": 4}, "gptq_marlin", "7.5"),
    "AWQ by Marlin": ({"quant_method": "awq", "bits": 4}, "awq_marlin", "7.5"),
    "GPTQ, 5 bits": ({"quant_method": "gptq", "bits": 5}, None, "2, 3, 4 or 8 bits, got 5"),
    "AWQ, 8 bits": ({"quant_method": "awq", "bits": 8}, None, "4 bits, got 8"),
    "FP8": ({"quant_method": "fp8"}, None, "7.5"),
    "quantizing to FP8 at load": (None, "fp8", "7.5"),
    "bitsandbytes": (None, "bitsandbytes", "package"),
    "MXFP4": ({"quant_method": "mxfp4"}, None, "8.0"),
    "compressed-tensors, asymmetric": (compressed(symmetric=False), None, "symmetric"),
    "compressed-tensors, by channel": (compressed(strategy="channel"), None, "groups"),
    "compressed-tensors W8A8": (compressed(num_bits=8, activations={"num_bits": 8}), None, "activations"),
    "compressed-tensors FP8": (compressed(type="float", num_bits=8), None, "7.5"),
}


@pytest.mark.parametrize(("data", "asked", "name"), RUNS.values(), ids=RUNS)
def test_what_runs_on_a_v100_says_by_which_kernels(data: dict[str, Any] | None, asked: str | None, name: str) -> None:
    met = meets(data, asked)
    assert met is not None
    assert met[0] == name
    assert "kernels" in met[1].volta


@pytest.mark.parametrize(("data", "asked", "why"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_says_why_and_what_to_do(data: dict[str, Any] | None, asked: str | None, why: str) -> None:
    met = meets(data, asked)
    assert met is not None
    assert not met[1].volta
    assert why in met[1].why
    assert met[1].remedy


@pytest.mark.parametrize(("data", "asked"), [(None, None), ({"quant_method": "new"}, None), ({}, "quasarnvfp4")])
def test_nothing_is_said_of_what_is_unknown_or_not_quantized(data: dict[str, Any] | None, asked: str | None) -> None:
    assert meets(data, asked) is None


def test_a_row_says_either_what_computes_it_or_why_nothing_does() -> None:
    for other in OTHERS.values():
        assert bool(other.volta) != bool(other.why)
