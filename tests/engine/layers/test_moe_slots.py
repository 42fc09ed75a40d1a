from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.layers.moe_slots import align, block_size
from engine.limits import EXPERT_BLOCKS


@given(
    experts=st.integers(1, 9),
    tokens=st.integers(0, 40),
    block=st.sampled_from(EXPERT_BLOCKS),
    data=st.data(),
)
def test_every_slot_is_listed_once_in_a_block_of_its_expert(
    experts: int, tokens: int, block: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    row = st.permutations(range(experts)).map(lambda order: list(order[:top_k]))
    chosen = data.draw(st.lists(row, min_size=tokens, max_size=tokens))
    ids = torch.tensor(chosen, dtype=torch.int32).reshape(tokens, top_k)
    slots, of_block, padded = align(ids, experts, block)
    assert slots.numel() == of_block.numel() * block
    used = slots[: int(padded)].tolist()
    assert sorted(slot for slot in used if slot < ids.numel()) == list(range(ids.numel()))
    assert all(slot == ids.numel() for slot in slots[int(padded) :].tolist())
    for place, slot in enumerate(used):
        if slot < ids.numel():
            assert ids.flatten()[slot] == of_block[place // block]
    # No block is without a slot of its expert.
    assert all(min(used[start : start + block]) < ids.numel() for start in range(0, len(used), block))


def test_shapes_do_not_depend_on_the_experts_chosen() -> None:
    one, many = torch.zeros(6, 2, dtype=torch.int32), torch.arange(12, dtype=torch.int32).reshape(6, 2)
    shapes = [[part.shape for part in align(ids, 12, 8)] for ids in (one, many)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("slots", "experts", "block"),
    [(1, 128, 8), (8 * 8, 8, 8), (8 * 8 + 1, 8, 16), (64 * 8, 8, 64), (8 * 1024, 8, 64), (0, 8, 8)],
)
def test_a_block_holds_what_an_expert_gets_on_average(slots: int, experts: int, block: int) -> None:
    assert block_size(slots, experts) == block
