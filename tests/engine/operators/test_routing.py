from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopk

OPS = torch.ops._moe_C
NOWHERE = -1
SCORES = {
    "topk_softmax": lambda logits: logits.double().softmax(-1),
    "topk_sigmoid": lambda logits: logits.double().sigmoid(),
    "topk_softplus_sqrt": lambda logits: torch.nn.functional.softplus(logits.double()).sqrt(),
}


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs(tokens: int, count: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((tokens, count), torch.nan),
        torch.full((tokens, count), -7, dtype=dtype),
        torch.full((tokens, count), -7, dtype=torch.int32),
    )


def call(name: str, out: tuple[torch.Tensor, ...], logits: torch.Tensor, **given: Any) -> None:
    """The operator with all its arguments, in the order of vllm/_custom_ops.py."""
    renormalize, bias = given.get("renormalize", False), given.get("bias")
    factor, padding = given.get("factor", 1.0), given.get("is_padding")
    rest: dict[str, tuple[Any, ...]] = {
        "topk_softmax": (renormalize, bias, padding),
        "topk_sigmoid": (renormalize, bias, factor, padding),
        "topk_softplus_sqrt": (renormalize, factor, bias, given.get("tokens"), given.get("table"), padding),
    }
    getattr(OPS, name)(*out, logits, *rest[name])


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_best_experts_and_their_weights(name: str, renormalize: bool, biased: bool, dtype: torch.dtype) -> None:
    logits = numbers(6, 12).to(dtype)
    bias = 3 * numbers(12, seed=2) if biased else None
    factor = 1.0 if name == "topk_softmax" else 2.5
    weights, ids, positions = outputs(6, 3)
    call(name, (weights, ids, positions), logits, renormalize=renormalize, bias=bias, factor=factor)
    scores = SCORES[name](logits)
    expected = (scores if bias is None else scores + bias).topk(3).indices
    picked = scores.gather(1, expected)
    picked = factor * (picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(weights.double(), picked, rtol=1e-5, atol=1e-6)
    assert positions.tolist() == [[token, 6 + token, 12 + token] for token in range(6)]


@pytest.mark.parametrize("name", SCORES)
def test_rows_of_padding_go_nowhere(name: str) -> None:
    weights, ids, positions = outputs(3, 2, torch.int64)
    call(name, (weights, ids, positions), numbers(3, 8), is_padding=torch.tensor([False, True, False]))
    assert ids[1].tolist() == [NOWHERE, NOWHERE]
    assert (ids[[0, 2]] >= 0).all()
    assert not weights.isnan().any()


def test_a_table_chooses_by_token() -> None:
    table = torch.tensor([[0, 1], [5, 2], [3, 4]], dtype=torch.int32)
    logits = numbers(2, 6)
    weights, ids, positions = outputs(2, 2)
    call("topk_softplus_sqrt", (weights, ids, positions), logits, tokens=torch.tensor([2, 1]), table=table)
    assert ids.tolist() == [[3, 4], [5, 2]]
    torch.testing.assert_close(weights, SCORES["topk_softplus_sqrt"](logits).gather(1, ids.long()).float())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_vllm_s_routers_call_them_as_they_are_declared(scoring: str) -> None:
    hidden, logits, bias = numbers(5, 4), numbers(5, 16), numbers(16, seed=3)
    if scoring != "sqrtsoftplus":
        weights, ids, _ = fused_topk(hidden, logits, 4, True, scoring_func=scoring)
        torch.testing.assert_close(weights.sum(-1), torch.ones(5))
        assert ids.shape == (5, 4)
    weights, ids = fused_topk_bias(hidden, logits, scoring, bias, 4, True, routed_scaling_factor=1.5)
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 1.5))


@pytest.mark.parametrize(("scoring", "groups", "chosen"), [("sigmoid", 4, 2), ("softmax", 2, 1), ("sigmoid", 1, 1)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_grouped_routing_is_vllm_s_own_in_torch(
    scoring: str, groups: int, chosen: int, renormalize: bool, vllm_config: Any
) -> None:
    """vLLM's torch code runs on CPUs. On GPUs vLLM calls the operator in its place."""
    logits, bias = numbers(7, 16), numbers(16, seed=4)
    layer = GroupedTopk(3, renormalize, groups, chosen, scoring, 2.5)
    weights, ids = layer.forward_native(numbers(7, 4), logits, bias)
    scores = logits if scoring == "sigmoid" else logits.softmax(-1)
    ours, our_ids = OPS.grouped_topk(scores, groups, chosen, 3, renormalize, 2.5, bias, int(scoring == "sigmoid"))
    order, our_order = ids.argsort(1), our_ids.argsort(1)
    assert torch.equal(our_ids.gather(1, our_order), ids.gather(1, order))
    torch.testing.assert_close(ours.gather(1, our_order), weights.gather(1, order))
    assert (ours.dtype, our_ids.dtype) == (torch.float32, torch.int32)


def aligned(ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    room = ids.numel() + experts * (block - 1)
    slots, of_block = (
        torch.full((room,), -7, dtype=torch.int32),
        torch.full((-(-room // block),), -7, dtype=torch.int32),
    )
    padded = torch.full((1,), -7, dtype=torch.int32)
    OPS.moe_align_block_size(ids, experts, block, slots, of_block, padded, expert_map)
    return slots, of_block, padded


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_slots_of_experts_that_are_here_are_listed_once(mapped: bool, block: int) -> None:
    ids = torch.randint(NOWHERE, 7, (9, 2), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    expert_map = torch.tensor([NOWHERE, 0, 2, NOWHERE, 1, NOWHERE, 3], dtype=torch.int32) if mapped else None
    slots, of_block, padded = aligned(ids, 7, block, expert_map)
    local = [int(one) if one < 0 or expert_map is None else int(expert_map[one]) for one in ids.flatten()]
    used = slots[: int(padded)].tolist()
    assert sorted(slot for slot in used if slot < 18) == [slot for slot in range(18) if local[slot] >= 0]
    for place, slot in enumerate(used):
        if slot < 18:
            assert of_block[place // block] == local[slot]
    assert set(slots[int(padded) :].tolist()) <= {18}
    assert set(of_block[int(padded) // block :].tolist()) <= {NOWHERE}
    needed = sum(-(-local.count(expert) // block) for expert in set(local) - {NOWHERE})
    assert int(padded) == needed * block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_leaves_out_what_went_nowhere(dtype: torch.dtype) -> None:
    x, out = numbers(3, 4, 10).to(dtype), torch.full((3, 10), torch.nan, dtype=dtype)
    OPS.moe_sum(x, out)
    torch.testing.assert_close(out.double(), x.double().sum(1), rtol=2e-3, atol=2e-3)
    ids = torch.tensor([[0, 1, 2, 3], [NOWHERE] * 4, [3, NOWHERE, 0, 1]], dtype=torch.int32)
    here = ids >= 0
    x[~here] = torch.nan  # nobody has computed these
    OPS.moe_sum(x, out, ids)
    torch.testing.assert_close(out.double(), x.double().nan_to_num(0).sum(1), rtol=2e-3, atol=2e-3)
    expert_map = torch.tensor([0, NOWHERE, 1, NOWHERE], dtype=torch.int32)
    OPS.moe_sum(x, out, ids, expert_map)
    kept = x.double().nan_to_num(0) * torch.isin(ids, torch.tensor([0, 2]))[..., None]
    torch.testing.assert_close(out.double(), kept.sum(1), rtol=2e-3, atol=2e-3)
