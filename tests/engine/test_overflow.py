from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.overflow import OverflowCheck
from quant.errors import QuantError

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


def test_nan_is_named_too_and_many_tensors_are_counted() -> None:
    check, model = OverflowCheck(torch.float16), Casting()
    model.weight[0] = torch.inf
    for number in range(5):
        check.look_at(f"t{number}", torch.tensor([1.0, torch.nan if number == 0 else 1e9]), "a.safetensors")
    with pytest.raises(QuantError, match=r"t0 \(a\.safetensors\).* got nan in float32; t1 .*; t2 .* and 2 more"):
        check.judge(model)


def test_empty_tensors_and_bytes_are_passed_over() -> None:
    check = OverflowCheck(torch.float16)
    for tensor in (torch.empty(0), torch.full((4,), 255, dtype=torch.uint8), torch.ones(4).to(torch.float8_e4m3fn)):
        check.look_at("t", tensor, "")
    model = Casting()
    model.weight.fill_(torch.inf)
    check.judge(model)
