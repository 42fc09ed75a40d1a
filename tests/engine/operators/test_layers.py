from __future__ import annotations

import pytest
import torch

OPS = torch.ops._C


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_norm_is_its_formula(dtype: torch.dtype, weighted: bool) -> None:
    x, residual = numbers(4, 3, 40, dtype=dtype), numbers(4, 3, 40, seed=2, dtype=dtype)
    weight = numbers(40, seed=3, dtype=dtype) if weighted else None
    total = x + residual

    def expected(of: torch.Tensor) -> torch.Tensor:
        normed = of.double() / (of.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed if weight is None else normed * weight.double()

    tolerance = 2.1 * torch.finfo(dtype).eps
    out = torch.empty_like(x)
    OPS.rms_norm(out, x, weight, 1e-5)
    torch.testing.assert_close(out.double(), expected(x), rtol=tolerance, atol=1e-6)
    OPS.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x.double(), expected(total), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("offset", "rotated"), [(0, 16), (0, 8), (4, 8)])
def test_a_rotation_turns_each_pair_by_its_angle(halves: bool, inverse: bool, offset: int, rotated: int) -> None:
    angles = numbers(20, rotated // 2, seed=2).double()
    positions = torch.tensor([3, 0, 19])
    query, key = numbers(3, 2 * 16), numbers(3, 16, seed=3)
    before = [tensor.double().view(3, -1, 16).clone() for tensor in (query, key)]
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    OPS.rotary_embedding(positions, query, key, 16, cos_sin, halves, offset, inverse)
    for tensor, heads in zip((query, key), before, strict=True):
        expected = heads.clone()
        for pair in range(rotated // 2):
            a, b = (pair, pair + rotated // 2) if halves else (2 * pair, 2 * pair + 1)
            turn = torch.polar(torch.ones(3).double(), angles[positions, pair] * (-1 if inverse else 1))[:, None]
            turned = torch.complex(heads[..., offset + a], heads[..., offset + b]) * turn
            expected[..., offset + a], expected[..., offset + b] = turned.real, turned.imag
        torch.testing.assert_close(tensor.view(3, -1, 16).double(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_were_there_are_penalized() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, False, False, True]]), torch.tensor([[False, False, False, True]])
    OPS.apply_repetition_penalties_(logits, *seen, torch.tensor([2.0]))
    assert logits.tolist() == [[1.0, -2.0, 2.0, -4.0]]


def test_slots_are_places_in_the_block_table() -> None:
    slots = torch.full((6,), -9)
    table = torch.tensor([[3, 4], [7, 5], [0, 0]], dtype=torch.int32)
    OPS.compute_slot_mapping_kernel_impl(
        torch.tensor([0, 3, 3, 4], dtype=torch.int32), torch.tensor([7, 8, 9, 2, 0, 0]), table, slots, 8
    )
    assert slots.tolist() == [3 * 8 + 7, 4 * 8, 4 * 8 + 1, 2, -9, -9]


def test_new_keys_and_values_go_to_their_slots() -> None:
    key, value = numbers(4, 2, 8, dtype=torch.float16), numbers(4, 2, 8, seed=2, dtype=torch.float16)
    caches = [torch.zeros(3, 4, 2, 8, dtype=torch.float16) for _ in range(2)]
    slots, scale = torch.tensor([9, -1, 0]), torch.ones(())
    torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *caches, slots, "auto", scale, scale)
    for new, cached in zip((key, value), caches, strict=True):
        assert torch.equal(cached.view(12, 2, 8)[[9, 0]], new[[0, 2]])
        assert cached.count_nonzero() == new[[0, 2]].count_nonzero()
    with pytest.raises(NotImplementedError, match="model's dtype, got fp8"):
        torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *caches, slots, "fp8", scale, scale)


def test_a_view_for_the_gpu_wants_page_locked_memory() -> None:
    with pytest.raises(ValueError, match=r"expected page-locked memory \(pin_memory\)"):
        OPS.get_cuda_view_from_cpu_tensor(torch.zeros(4))
