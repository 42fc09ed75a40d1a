from __future__ import annotations

from typing import Any

import pytest

from quant.formats.others import meets


def compressed(**weights: Any) -> dict[str, Any]:
    activations = weights.pop("activations", None)
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": said, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
REFUSED: dict[str, tuple[dict[str, Any] | None, str | None, str, str]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None, "gptq", "GPTQ"),
    "GPTQ by Marlin": ({"quant_method": "gptq", "bits": 4}, "gptq_marlin", "gptq_marlin", "GPTQ"),
    "AWQ": ({"quant_method": "awq", "bits": 4, "zero_point": True}, None, "awq", "AWQ"),
    "AutoRound in GPTQ's layout": (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, None, "auto-round", "GPTQ"),
    "AutoRound in AWQ's layout": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, None, "auto-round", "AWQ"),
    "compressed-tensors int4": (compressed(), None, "compressed-tensors", "int weights of 4 bits"),
    "compressed-tensors FP8": (compressed(type="float", num_bits=8), None, "compressed-tensors", "float weights of 8"),
    "GGUF": (None, "gguf", "gguf", "GGUF"),
    "FP8": ({"quant_method": "fp8"}, None, "fp8", "FP8"),
    "quantizing to FP8 at load": (None, "fp8_per_block", "fp8_per_block", "while loading"),
    "bitsandbytes": (None, "bitsandbytes", "bitsandbytes", "bitsandbytes"),
    "MXFP4": ({"quant_method": "mxfp4"}, None, "mxfp4", "MXFP4"),
    "ModelOpt's FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, None, "modelopt", "ModelOpt's FP8"),
}


@pytest.mark.parametrize(("data", "asked", "name", "what"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_kernels_says_what_it_is_and_what_to_do(
    data: dict[str, Any] | None, asked: str | None, name: str, what: str
) -> None:
    met = meets(data, asked)
    assert met is not None
    assert met[0] == name
    assert what in met[1].what
    assert "NVFP4" in met[1].why
    assert "NVFP4" in met[1].remedy


@pytest.mark.parametrize(("data", "asked"), [(None, None), ({"quant_method": "new"}, None), ({}, "quasarnvfp4")])
def test_nothing_is_said_of_what_is_unknown_or_not_quantized(data: dict[str, Any] | None, asked: str | None) -> None:
    assert meets(data, asked) is None


def test_mixed_precision_is_described_by_its_kinds() -> None:
    config = compressed()
    config["config_groups"]["group_1"] = compressed(type="float", num_bits=8)["config_groups"]["group_0"]
    met = meets(config, None)
    assert met is not None
    assert met[1].what == "compressed-tensors, mixed precision: float weights of 8 bits, int weights of 4 bits"
