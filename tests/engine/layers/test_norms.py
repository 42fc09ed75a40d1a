"""Norms that scale by 1 + w, against vLLM's own plain form of them."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from engine.layers.norms import UnitOffsetRMSNorm


def norm(size: int, dtype: torch.dtype) -> UnitOffsetRMSNorm:
    made: UnitOffsetRMSNorm = UnitOffsetRMSNorm(size, eps=1e-6).to(dtype)
    made.weight.data = (0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1))).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("residual_dtype", [None, "same", torch.float32])
@pytest.mark.parametrize("shape", [(1, 160), (5, 2, 64), (0, 32)])
def test_values_are_vllm_s_and_sums_lose_nothing(
    vllm_config: VllmConfig, dtype: torch.dtype, residual_dtype: torch.dtype | str | None, shape: tuple[int, ...]
) -> None:
    random = torch.Generator().manual_seed(2)
    made = norm(shape[-1], dtype)
    x = (3 * torch.randn(shape, generator=random)).to(dtype)
    residual = None
    if residual_dtype is not None:
        kept = dtype if isinstance(residual_dtype, str) else residual_dtype
        residual = torch.randn(shape, generator=random).to(kept)
    expected = GemmaRMSNorm.forward_native(made, x.clone(), None if residual is None else residual.clone())
    got = made(x.clone(), None if residual is None else residual.clone())
    pairs = [(got, expected)] if residual is None else list(zip(got, expected, strict=True))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, check_dtype=False)
    assert pairs[0][0].dtype == dtype
    if residual is not None:  # vLLM rounds the sum to x's dtype
        assert pairs[1][0].dtype == (torch.float32 if dtype == torch.float16 else residual.dtype)


def test_rows_may_lie_apart(vllm_config: VllmConfig) -> None:
    """As the heads of a fused projection do."""
    made = norm(32, torch.float32)
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    heads = wide[:, 4:68].unflatten(1, (2, 32))
    torch.testing.assert_close(made(heads), GemmaRMSNorm.forward_native(made, heads))


def test_a_large_sum_does_not_overflow_float16(vllm_config: VllmConfig) -> None:
    x = torch.full((1, 32), 6e4, dtype=torch.float16)
    y, total = norm(32, torch.float16)(x, x.clone())
    assert total.dtype == torch.float32
    assert total.isfinite().all()
    assert y.isfinite().all()
