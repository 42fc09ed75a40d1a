"""What verify says of FP8 linears: tensors that do not fit, values, fused layers, and what is not served."""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

import pytest

from quant.verify import Target, examine
from quant.verify.report import verify
from tests.quant.checkpoints import COMPRESSED_TENSORS, compressed_tensors_linear
from tests.quant.lookalikes import experts, fp8, half, write

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
Q = "model.layers.0.self_attn.q_proj"


def model(directory: Path, extra: dict[str, Any] | None = None, **changed: Any) -> Path:
    arguments: dict[str, Any] = {"attention": fp8, "mlp": fp8, "extra": extra, **changed}
    return write(directory / "model", "Qwen3ForCausalLM", FP8, **arguments)


def with_scale(dtype: str, shape: list[int], data: bytes, name: str = "weight_scale") -> Any:
    def linear(module: str, rows: int, columns: int) -> dict[str, Any]:
        tensors = fp8(module, rows, columns)
        if module == Q:
            del tensors[f"{module}.weight_scale"]
            tensors[f"{module}.{name}"] = (dtype, shape, data)
        return tensors

    return linear


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


@pytest.mark.parametrize("depth", ["headers", "full"])
@pytest.mark.parametrize("scale", [[1], [64], [64, 1], []])
def test_a_whole_model_has_nothing_wrong(tmp_path: Path, depth: Any, scale: list[int]) -> None:
    count = 64 if scale[:1] == [64] else 1
    report = verify(model(tmp_path, attention=with_scale("F32", scale, floats(*[0.5] * count))), depth)

    assert report.ok, list(map(str, report.findings))
    assert len(report.modules.fp8) == 14
    assert {finding.check for finding in report.findings} == {"activations"}


BROKEN: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "a scale for some of the rows": (("F32", [5, 1], floats(*[1] * 5)), "shape", "one scale, one per row, or one"),
    "scales along K": (("F32", [1, 64], floats(*[1] * 64)), "shape", "one per 128x128 block"),
    "E8M0 scales": (("F8_E8M0", [1], b"\x7f"), "dtype", "F32 or BF16 or F16"),
    "NVFP4's scales": (("F8_E4M3", [64, 4], b"\x38" * 256), "dtype", "F32 or BF16 or F16"),
    "no scale": (("F32", [1], floats(1), "other"), "missing-tensor", "one scale tensor of its E4M3 weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_scale_that_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    scale, check, expected = BROKEN[name]
    report = verify(model(tmp_path, attention=with_scale(*scale)))

    found = [one for one in report.findings if one.check == check and one.severity == "error"]
    assert [one.tensor for one in found] == [f"{Q}.weight_scale"], list(map(str, report.findings))
    assert expected in found[0].expected


def test_two_scales_of_one_weight_are_refused(tmp_path: Path) -> None:
    report = verify(model(tmp_path, {f"{Q}.weight_scale_inv": ("F32", [1], floats(1))}))

    assert [one.got for one in report.findings if one.severity == "error"] == ["weight_scale and weight_scale_inv"]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_weights_are_found_by_reading_everything(tmp_path: Path, code: int) -> None:
    def linear(module: str, rows: int, columns: int) -> dict[str, Any]:
        tensors = fp8(module, rows, columns)
        if module == Q:
            data = bytearray(tensors[f"{module}.weight"][2])
            data[65] = code
            tensors[f"{module}.weight"] = ("F8_E4M3", [rows, columns], bytes(data))
        return tensors

    report = verify(model(tmp_path, attention=linear), "full")

    found = [one for one in report.findings if one.check == "not-a-number"]
    assert [(one.tensor, one.got) for one in found] == [(f"{Q}.weight", "NaN at [1, 1]")]


@pytest.mark.parametrize(
    ("number", "check"), [(float("nan"), "not-a-number"), (float("inf"), "not-a-number"), (-1.0, "scale")]
)
def test_scales_that_are_no_positive_numbers_are_found(tmp_path: Path, number: float, check: str) -> None:
    report = verify(model(tmp_path, attention=with_scale("F32", [1], floats(number))), "full")

    assert [one.tensor for one in report.findings if one.check == check] == [f"{Q}.weight_scale"]
    assert not report.ok


def test_fp8_beside_16_bits_in_layers_that_are_fused_is_refused(tmp_path: Path) -> None:
    def linear(module: str, rows: int, columns: int) -> dict[str, Any]:
        return half(module, rows, columns) if module == Q else fp8(module, rows, columns)

    found = examine(model(tmp_path, attention=linear), Target("cpu")).refusals

    assert [one.check for one in found] == ["fused"]
    assert found[0].got.startswith("16-bit beside FP8: ")


def test_blocks_beside_rows_in_layers_that_are_fused_are_refused(tmp_path: Path) -> None:
    def linear(module: str, rows: int, columns: int) -> dict[str, Any]:
        tensors = fp8(module, rows, columns)
        if module.endswith("q_proj"):
            tensors[f"{module}.weight"] = ("F8_E4M3", [256, 256], b"\x38" * 65536)
            tensors[f"{module}.weight_scale"] = ("F32", [2, 2], floats(1, 1, 1, 1))
        return tensors

    found = examine(model(tmp_path, attention=linear), Target("cpu")).refusals

    assert "FP8 beside FP8 in blocks" in " ".join(one.got for one in found if one.check == "fused")


def test_fp8_experts_and_heads_are_not_served(tmp_path: Path) -> None:
    more = experts(("gate_proj", "down_proj", "up_proj"), fp8) | {"mlp.gate": (2, 64, half)}
    directory = write(
        tmp_path / "model", "Qwen3MoeForCausalLM", FP8, attention=fp8, head=fp8, more=more, config=EXPERTS
    )
    for device in ("cpu", "volta"):
        found = [str(one) for one in examine(directory, Target(device)).refusals]
        assert any(
            "lm_head: expected 16-bit weights, got FP8 per tensor in lm_head: the engine keeps a head" in one
            for one in found
        )
        assert any("the kernel for experts reads no FP8" in one for one in found)


def test_a_config_that_says_nvfp4_only_is_not_believed_about_fp8(tmp_path: Path) -> None:
    """compressed-tensors' list is exact, and the engine does not look at tensors then."""
    config = copy.deepcopy(COMPRESSED_TENSORS)
    directory = write(tmp_path / "model", "Qwen3ForCausalLM", config, attention=fp8)

    found = examine(directory, Target("cpu")).refusals

    assert "no FP8 linears, as" in found[0].expected


def test_a_config_that_says_fp8_only_is_not_believed_about_nvfp4(tmp_path: Path) -> None:
    found = examine(model(tmp_path, mlp=compressed_tensors_linear), Target("cpu")).refusals

    assert "no NVFP4 linears, as" in found[0].expected
