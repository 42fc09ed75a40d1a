"""FP8: the config of `quant_method: fp8`, the kinds that scales' shapes tell, and linears read into the one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lookalikes.linears import fp8_member
from quant.errors import QuantError
from quant.formats import fp8, registry
from quant.formats.fp8_linear import read_linear
from quant.formats.weights import PER_BLOCK, PER_ROW, PER_TENSOR, fp8_kind, nvfp4
from tests.quant.reference import E4M3_NANS

OFFICIAL = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}


def test_the_published_config_is_read() -> None:
    read = fp8.read_config(OFFICIAL, "config.json")

    assert (read.format, read.elements, read.w8a8, read.w4a4) == ("fp8", ("E4M3",), True, False)
    assert read.ignore is not None
    assert len(read.ignore) == 2
    assert not registry.ignore_is_exact(read)


def test_a_config_without_blocks_and_lists_is_read() -> None:
    assert fp8.read_config({"quant_method": "fp8"}, "config.json").ignore is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fmt": "e5m2"}, "fmt: expected 'e4m3', got 'e5m2'"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size: expected \[128, 128\] or null, got \[64, 128\]"),
        ({"weight_block_size": 128}, "weight_block_size: expected a list, got 128"),
        ({"ignored_layers": [4]}, r"modules_to_not_convert: expected names, got \["),
    ],
)
def test_another_config_is_refused_naming_the_key(changed: dict[str, object], message: str) -> None:
    with pytest.raises(QuantError, match=rf"^config\.json: {message}"):
        fp8.read_config(OFFICIAL | changed, "config.json")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((), PER_TENSOR),
        ((1,), PER_TENSOR),
        ((1, 1), PER_TENSOR),
        ((300,), PER_ROW),
        ((300, 1), PER_ROW),
        ((3, 2), PER_BLOCK),
        ((3, 1, 2, 1), PER_BLOCK),  # ModelOpt's
        ((1, 300), None),
        ((2, 3), None),
        ((200,), None),
        ((300, 2), None),
        ((0,), None),
    ],
)
def test_the_scale_s_shape_tells_the_kind(shape: tuple[int, ...], kind: object) -> None:
    assert fp8_kind(300, 200, shape) == kind


def test_bytes_and_columns_follow_from_the_kind() -> None:
    assert PER_TENSOR.packed_bytes(64, 256) == PER_ROW.packed_bytes(64, 256) == 64 * 256 + 4 * 64
    assert PER_BLOCK.packed_bytes(64, 300) == 64 * 300 + 4 * 64 * 3
    assert nvfp4(16).packed_bytes(64, 256) == 64 * 128 + 64 * 16 + 4 * 64
    assert (PER_ROW.column_multiple, PER_BLOCK.column_multiple, nvfp4(32).column_multiple) == (16, 128, 32)
    assert [str(kind) for kind in (PER_TENSOR, PER_ROW, PER_BLOCK)] == [
        "FP8 per tensor",
        "FP8 per channel",
        "FP8 per 128x128 block",
    ]


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", fp8.SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_is_read_into_its_values(kind: str, name: str, dtype: torch.dtype) -> None:
    part = fp8_member(300, 208, kind, name)
    stored = part.tensors[name].to(dtype)
    tensor = read_linear({"weight": part.tensors["weight"], name: stored}, "layer")

    exact = part.weight if dtype == torch.float32 else None
    assert tensor.shape == (300, 208)
    if exact is not None:
        torch.testing.assert_close(tensor.dequantize().double(), exact, rtol=1e-7, atol=0)
    assert tensor.scales.dtype == torch.float32
    assert float(tensor.scales[299, -1]) == float(stored.flatten()[-1])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({"weight_scale": None}, r"layer: expected weight and one of weight_scale, .*got .*weight"),
    "two scales": ({"weight_scale_inv": torch.ones(1)}, r"layer: expected weight and one of"),
    "no weight": ({"weight": None}, r"layer: expected weight and one of"),
    "NVFP4's codes": ({"weight": torch.ones(8, 8).byte()}, r"layer\.weight: expected float8_e4m3fn \[N, K\], got"),
    "three dimensions": ({"weight": torch.ones(2, 8, 16).to(torch.float8_e4m3fn)}, r"layer\.weight: expected"),
    "too few scales": ({"weight_scale": torch.ones(7)}, r"layer\.weight_scale: expected one scale, .*got \[7\]"),
    "a negative scale": ({"weight_scale": torch.tensor([-1.0])}, r"layer\.weight_scale: expected positive scales"),
    "an infinite scale": ({"weight_scale": torch.tensor([torch.inf])}, r"layer\.weight_scale: expected positive"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit_are_named(name: str) -> None:
    changed, message = WRONG[name]
    part = fp8_member(8, 16)
    tensors = {key: part.tensors[key] for key in ("weight", "weight_scale")} | changed
    with pytest.raises(QuantError, match=message):
        read_linear({key: tensor for key, tensor in tensors.items() if tensor is not None}, "layer")


@pytest.mark.parametrize("nan", E4M3_NANS)
def test_a_weight_that_is_nan_is_named_with_its_index(nan: int) -> None:
    part = fp8_member(8, 16)
    part.tensors["weight"].view(torch.uint8)[2, 3] = nan
    with pytest.raises(QuantError, match=r"layer\.weight\[2, 3\]: expected a number, got NaN"):
        read_linear({key: part.tensors[key] for key in ("weight", "weight_scale")}, "layer")
