from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.weights.overflow import OverflowCheck
from quant.errors import QuantError
from tests.quant.reference import E4M3_NANS, E4M3_NUMBERS

NAME = "model.norm.weight"


class Casting(nn.Module):
    """A model of one parameter, into which the checkpoint's tensor is cast."""

    def __init__(self, dtype: torch.dtype = torch.float16, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.weight.copy_(tensor)
        return {"weight"}


def write(directory: Path, value: float, dtype: torch.dtype, name: str = NAME) -> None:
    tensor = torch.ones(8, dtype=dtype)
    tensor[3] = value
    save_file({name: tensor}, directory / "model.safetensors")


# 65,519.99… still rounds to 65,504, and bfloat16 has nothing between 65,280 and 65,536.
TOO_LARGE = [(65536.0, torch.bfloat16), (-65536.0, torch.bfloat16), (3e38, torch.bfloat16), (65520.0, torch.float32)]
FITS = [(65280.0, torch.bfloat16), (65519.0, torch.float32), (1e-30, torch.bfloat16), (1.001, torch.float32)]


@pytest.mark.parametrize(("value", "dtype"), TOO_LARGE)
def test_a_tensor_that_overflows_float16_is_named(
    tmp_path: Path,
    load: Any,
    value: float,
    dtype: torch.dtype,
) -> None:
    write(tmp_path, value, dtype)
    with pytest.raises(
        QuantError, match=rf"{NAME} \(model\.safetensors\): expected values within ±65,504, got "
    ) as raised:
        load(tmp_path, Casting(), torch.float16)
    assert "--dtype float32" in str(raised.value)


@pytest.mark.parametrize(("value", "dtype"), FITS)
def test_rounding_and_underflow_are_no_error(
    tmp_path: Path,
    load: Any,
    value: float,
    dtype: torch.dtype,
) -> None:
    write(tmp_path, value, dtype)
    model = Casting()
    load(tmp_path, model, torch.float16)
    assert model.weight[3] == torch.tensor(value, dtype=dtype).half()


def test_a_tensor_that_the_model_keeps_in_float32_may_be_large(tmp_path: Path, load: Any) -> None:
    write(tmp_path, 1e6, torch.float32)
    load(tmp_path, Casting(torch.float32), torch.float16)


def test_an_engine_in_float32_takes_every_value(tmp_path: Path, load: Any) -> None:
    write(tmp_path, 3e38, torch.bfloat16)
    load(tmp_path, Casting(torch.float32), torch.float32)


@pytest.mark.parametrize("suffix", ["weight_global_scale", "weight_scale_2", "input_scale", "k_scale"])
def test_scales_that_stay_in_float32_are_not_looked_at(suffix: str) -> None:
    check = OverflowCheck(torch.float16)
    check.look_at(f"model.layers.0.mlp.up_proj.{suffix}", torch.tensor([1e6]), "")
    check.judge(Casting())
    model = Casting()
    model.weight.fill_(torch.inf)
    check.judge(model)


def test_many_tensors_are_counted() -> None:
    check, model = OverflowCheck(torch.float16), Casting()
    model.weight[0] = torch.inf
    for number in range(5):
        check.look_at(f"t{number}", torch.tensor([1.0, 1e9]), "a.safetensors")
    with pytest.raises(QuantError, match=r"t0 \(a\.safetensors\).* got 1e\+09 in float32; t1 .*; t2 .* and 2 more"):
        check.judge(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("computed", [torch.float16, torch.float32])
def test_a_tensor_that_is_not_finite_is_named(
    tmp_path: Path, load: Any, value: float, stored: torch.dtype, computed: torch.dtype
) -> None:
    write(tmp_path, value, stored)
    with pytest.raises(QuantError, match=rf"{NAME} \(model\.safetensors\): expected finite values, got {value:g} in "):
        load(tmp_path, Casting(computed), computed)


@pytest.mark.parametrize("byte", E4M3_NANS)
@pytest.mark.parametrize("name", ["weight_scale", "weight"])
def test_fp8_that_is_not_finite_is_named(tmp_path: Path, load: Any, byte: int, name: str) -> None:
    tensor = torch.arange(8, dtype=torch.uint8)
    tensor[5] = byte
    save_file({f"a.{name}": tensor.view(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(
        QuantError, match=rf"a\.{name} \(model\.safetensors\): expected finite values, got nan in float8"
    ):
        load(tmp_path, Casting(torch.float8_e4m3fn), torch.float16)


def test_every_finite_fp8_passes(tmp_path: Path, load: Any) -> None:
    tensor = torch.tensor(E4M3_NUMBERS, dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file({"a.weight_scale": tensor}, tmp_path / "model.safetensors")
    load(tmp_path, Casting(torch.float8_e4m3fn, len(E4M3_NUMBERS)), torch.float16)


@pytest.mark.parametrize("name", ["weight_global_scale", "weight_scale_2"])
def test_a_global_scale_that_is_not_finite_is_named(tmp_path: Path, load: Any, name: str) -> None:
    write(tmp_path, torch.nan, torch.float32, f"a.{name}")
    with pytest.raises(QuantError, match=rf"a\.{name} .*got nan in float32"):
        load(tmp_path, Casting(torch.float32), torch.float16)


@pytest.mark.parametrize("name", ["a.input_scale", "a.input_global_scale", "a.k_scale"])
def test_a_scale_that_is_not_used_may_be_anything(tmp_path: Path, load: Any, name: str) -> None:
    write(tmp_path, torch.nan, torch.float32, name)
    load(tmp_path, Casting(torch.float32), torch.float32)


def test_a_tensor_that_the_model_does_not_hold_may_be_anything(tmp_path: Path, load: Any) -> None:
    class Deaf(Casting):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            return {"weight"} if list(weights) else set()

    write(tmp_path, torch.nan, torch.float32)
    load(tmp_path, Deaf(), torch.float16)


def test_empty_tensors_and_bytes_are_passed_over() -> None:
    check = OverflowCheck(torch.float16)
    for tensor in (torch.empty(0), torch.full((4,), 255, dtype=torch.uint8), torch.ones(4).to(torch.float8_e4m3fn)):
        check.look_at("t", tensor, "")
    model = Casting()
    model.weight.fill_(torch.inf)
    check.judge(model)
