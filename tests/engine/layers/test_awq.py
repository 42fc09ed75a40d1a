"""AWQ's weights in GPTQ's arrangement, computed by GPTQ's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, UnquantizedLinearMethod

from engine.layers import awq
from engine.layers.awq import AwqOnGptqKernels, VoltaAwqConfig
from tests.engine.conftest import AsRank

VOLTA = 70
GROUP, COLUMN_ORDER = 32, (0, 2, 4, 6, 1, 3, 5, 7)  # which columns stand from an int32's lowest bits up


def as_int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def stored(values: torch.Tensor) -> torch.Tensor:
    """Values [R, C] as AWQ stores them, byte by byte as its paper's code does."""
    words = [
        [
            as_int32(sum(int(row[8 * word + column]) << 4 * place for place, column in enumerate(COLUMN_ORDER)))
            for word in range(values.shape[1] // 8)
        ]
        for row in values
    ]
    return torch.tensor(words, dtype=torch.int32)


def test_unpacking_undoes_awq_s_order() -> None:
    values = torch.randint(16, (5, 24), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    assert torch.equal(awq.unpack(stored(values)), values)


@pytest.mark.parametrize("dim", [0, 1])
def test_packing_puts_the_first_of_eight_into_the_lowest_bits(dim: int) -> None:
    values = torch.randint(16, (16, 24), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = awq.pack(values, dim)
    assert packed.dtype == torch.int32
    for place in range(8):
        picked = values[place::8] if dim == 0 else values[:, place::8]
        assert torch.equal(packed >> 4 * place & 0xF, picked)


def gptq_gemm(x: Any, weights: Any, zeros: Any, scales: Any, order: Any, shuffled: bool, v2: bool, bits: int) -> Any:
    """What the op is to compute, from GPTQ's description; vLLM's CUDA kernels are not in a CPU's wheel."""
    assert (shuffled, v2, bits, order.numel()) == (True, True, 4, 0)
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    q = (weights[:, None, :] >> shifts[None, :, None] & 15).flatten(0, 1)
    z = (zeros[:, :, None] >> shifts & 15).flatten(1)
    group = q.shape[0] // z.shape[0]
    w = (q - z.repeat_interleave(group, 0)).double() * scales.double().repeat_interleave(group, 0)
    return (x.double() @ w).to(x.dtype)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_an_awq_layer_computes_what_its_tensors_say(
    as_rank: AsRank, monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    as_rank(rank, size)
    shuffled: list[torch.Tensor] = []
    monkeypatch.setattr("engine.layers.awq.ops.gptq_gemm", gptq_gemm)
    monkeypatch.setattr("engine.layers.awq.ops.gptq_shuffle", lambda weights, *_: shuffled.append(weights))
    random = torch.Generator().manual_seed(0)
    q = torch.randint(16, (64, 48), generator=random, dtype=torch.int32)
    z = torch.randint(16, (2, 48), generator=random, dtype=torch.int32)
    scales = torch.rand(2, 48, generator=random).half()
    torch.set_default_dtype(torch.float16)
    try:
        layer = ColumnParallelLinear(64, 48, quant_config=VoltaAwqConfig(4, GROUP, True), prefix="layer")
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(layer.quant_method, AwqOnGptqKernels)
    for name, tensor in (("qweight", stored(q)), ("qzeros", stored(z)), ("scales", scales)):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    assert shuffled[0] is layer.qweight.data or torch.equal(shuffled[0], layer.qweight)
    own = slice(48 // size * rank, 48 // size * (rank + 1))
    w = (q - z.repeat_interleave(GROUP, 0)).double() * scales.double().repeat_interleave(GROUP, 0)
    x, bias = torch.randn(3, 64, generator=random).half(), torch.randn(48 // size, generator=random).half()
    expected = (x.double() @ w[:, own]).half() + bias
    torch.testing.assert_close(layer.quant_method.apply(layer, x, bias), expected, rtol=2e-3, atol=1e-2)


def test_modules_left_in_16_bits_stay_so(as_rank: AsRank) -> None:
    as_rank(0, 1)
    config = VoltaAwqConfig(4, GROUP, True, modules_to_not_convert=["gate"])
    layer = ReplicatedLinear(64, 48, quant_config=config, prefix="mlp.gate")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)


def test_awq_asks_for_volta_only() -> None:
    assert VoltaAwqConfig.get_min_capability() == VOLTA
