"""The float64 reference of rotate_and_cache against vLLM's own norm and rotation."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from kernels.tools.rotation_reference import rotated_heads

TOKENS, HEADS, HEAD_DIM, POSITIONS = 7, 3, 64, 100


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("rotated", [HEAD_DIM, 32])
@pytest.mark.parametrize("norms", [False, True])
def test_the_reference_is_vllms_norm_and_rotation(halves: bool, rotated: int, norms: bool) -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=random)
    positions = torch.randint(POSITIONS, (TOKENS,), generator=random)
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(HEAD_DIM, 1e-6)
        rotation = RotaryEmbedding(HEAD_DIM, rotated, POSITIONS, 10000.0, halves, torch.float32)
    norm.weight.data.normal_(1, 0.2, generator=random)
    heads = norm.forward_native(x) if norms else x
    assert isinstance(heads, torch.Tensor)
    expected, _ = rotation.forward_native(positions, heads.flatten(1).clone())
    weight = norm.weight.data if norms else None
    exact, allowed = rotated_heads(x, positions, rotation.cos_sin_cache, halves, weight)
    assert torch.allclose(expected.view_as(x).double(), exact, atol=1e-5)
    assert allowed.shape == x.shape
    assert (allowed <= 2.0**-8 * exact.abs().max()).all()
