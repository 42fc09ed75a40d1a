from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers import activation as vllm_activation

Formula = Callable[[torch.Tensor], torch.Tensor]


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def clamped(x: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    gate, up = halves(x)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + beta)


def situ(x: torch.Tensor, beta: float, linear: float | None) -> torch.Tensor:
    gate, up = halves(x)
    up = up if linear is None else linear * torch.tanh(up / linear)
    return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * up


FORMULAS: dict[str, tuple[Formula, bool, tuple[float, ...]]] = {
    "silu_and_mul": (lambda x: functional.silu(halves(x)[0]) * halves(x)[1], True, ()),
    "mul_and_silu": (lambda x: halves(x)[0] * functional.silu(halves(x)[1]), True, ()),
    "gelu_and_mul": (lambda x: functional.gelu(halves(x)[0]) * halves(x)[1], True, ()),
    "gelu_tanh_and_mul": (lambda x: tanh_gelu(halves(x)[0]) * halves(x)[1], True, ()),
    "gelu_new": (tanh_gelu, False, ()),
    "gelu_fast": (tanh_gelu, False, ()),
    "gelu_quick": (lambda x: x / (1 + torch.exp(-1.702 * x)), False, ()),
    "relu_squared": (lambda x: x.clamp(min=0) ** 2, False, ()),
    "fatrelu_and_mul": (lambda x: halves(x)[0] * (halves(x)[0] > 0.25) * halves(x)[1], True, (0.25,)),
    "silu_and_mul_with_clamp": (lambda x: clamped(x, 1.5, 1.0, 0.0), True, (1.5,)),
    "swigluoai_and_mul": (
        lambda x: clamped(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), 1.25, 1.7, 1.0), True, (1.7, 1.25)
    ),
    "situ_and_mul": (lambda x: situ(x, 2.0, 0.5), True, (2.0, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_is_its_formula_in_float64(name: str, dtype: torch.dtype) -> None:
    formula, gated, parameters = FORMULAS[name]
    x = (2 * torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))).to(dtype)
    out = torch.full((3, 5, 24 if gated else 48), torch.nan, dtype=dtype)
    getattr(torch.ops._C, name)(out, x, *parameters)
    # Two roundings, of the activation and of the product.
    torch.testing.assert_close(out.double(), formula(x.double()), rtol=2.1 * torch.finfo(dtype).eps, atol=1e-6)


def test_the_defaults_are_those_of_vllm_s_library() -> None:
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    out, same = torch.empty(2, 8), torch.empty(2, 8)
    for name, given in (
        ("silu_and_mul_with_clamp", (3.0, 1.0, 0.0)),
        ("swigluoai_and_mul", (1.702, 7.0)),
        ("situ_and_mul", (1.0, -1.0)),
    ):
        operator = getattr(torch.ops._C, name)
        operator(out, x, *given[:1] if name == "silu_and_mul_with_clamp" else ())
        operator(same, x, *given)
        assert torch.equal(out, same)


@pytest.mark.parametrize(
    ("layer", "options", "width"),
    [
        ("SiluAndMul", {}, 32), ("MulAndSilu", {}, 32), ("FatreluAndMul", {"threshold": 0.3}, 32),
        ("SituAndMul", {"beta": 2.0, "linear_beta": 0.5}, 32), ("SituAndMul", {}, 32),
        ("SiluAndMulWithClamp", {"swiglu_limit": 1.0, "alpha": 1.3, "beta": 0.5}, 32),
        ("GeluAndMul", {}, 32), ("GeluAndMul", {"approximate": "tanh"}, 32), ("SwigluOAIAndMul", {}, 32),
        ("NewGELU", {}, 16), ("FastGELU", {}, 16), ("QuickGELU", {}, 16), ("ReLUSquaredActivation", {}, 16),
    ],
)  # fmt: skip
def test_vllm_s_layer_calls_it_as_it_is_declared(
    layer: str, options: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch, vllm_config: Any
) -> None:
    """As on a GPU: the layer takes the operator when it is built, and its result is that of its own torch code."""
    monkeypatch.setattr(type(vllm_activation.current_platform), "is_cuda_alike", lambda _platform: True)
    made = getattr(vllm_activation, layer)(**options)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(made.forward_cuda(x), made.forward_native(x), rtol=1e-5, atol=1e-6)
