from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.utils import cpu_triton_utils as on_cpu
from vllm.v1.sample import rejection_sampler

from engine import patches

NO_TOKEN = -1
ENDS = torch.tensor([3, 3, 5])  # of the drafts of three requests, the second without any
DRAFTS = torch.tensor([4, 5, 6, 7, 8])
BONUS = torch.tensor([[90], [91], [92]], dtype=torch.int32)


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, NO_TOKEN, dtype=torch.int32)


def test_greedy_drafts_are_kept_up_to_the_first_that_is_wrong() -> None:
    out = empty(3, 4)
    best = torch.tensor([4, 1, 6, 7, 8])
    on_cpu.rejection_greedy_sample_kernel[(3,)](out, ENDS, DRAFTS, best, BONUS, None, 3)
    assert out.tolist() == [[4, 1, NO_TOKEN, NO_TOKEN], [91, *[NO_TOKEN] * 3], [7, 8, 92, NO_TOKEN]]


def test_requests_that_are_not_greedy_are_left_alone() -> None:
    out = empty(3, 4)
    greedy = torch.tensor([False, True, False])
    on_cpu.rejection_greedy_sample_kernel[(3,)](out, ENDS, DRAFTS, DRAFTS, BONUS, greedy, 3)
    assert out.tolist() == [[NO_TOKEN] * 4, [91, *[NO_TOKEN] * 3], [NO_TOKEN] * 4]


@pytest.mark.parametrize("certain", [False, True])
def test_random_drafts_are_kept_with_their_ratio_of_probabilities(certain: bool) -> None:
    target = torch.full((5, 10), 0.05)
    target[torch.arange(5), DRAFTS] = torch.tensor([0.5, 0.1, 0.9, 0.4, 0.3])
    draft = None if certain else torch.full((5, 10), 0.5)
    uniform = torch.tensor([0.45, 0.21, 0.0, 0.3, 0.9], dtype=torch.float64)
    out, recovered = empty(3, 4), torch.arange(50, 55)
    given = (out, ENDS, DRAFTS, draft, target, BONUS, recovered, uniform, torch.tensor([False, False, False]), 3, 10)
    on_cpu.rejection_random_sample_kernel[(3,)](*given, NO_DRAFT_PROBS=certain)
    # Against 0.5: ratios 1.0, 0.2, 1.8, 0.8, 0.6. Certain drafts: 0.5, 0.1, 0.9, 0.4, 0.3.
    assert out.tolist() == [[4, 51, NO_TOKEN, NO_TOKEN], [91, *[NO_TOKEN] * 3], [7, 54, NO_TOKEN, NO_TOKEN]]


@pytest.mark.parametrize("certain", [False, True])
def test_a_lost_draft_is_replaced_from_what_the_target_has_beyond_it(certain: bool) -> None:
    random = torch.Generator().manual_seed(2)
    target, draft = (torch.rand(5, 10, generator=random).softmax(-1) for _ in range(2))
    weights = torch.rand(3, 10, generator=random)
    out = torch.full((5,), NO_TOKEN)
    on_cpu.sample_recovered_tokens_kernel[(3, 3)](
        out, ENDS, DRAFTS, None if certain else draft, target, weights, 10, 1, NO_DRAFT_PROBS=certain
    )
    for place, request in enumerate((0, 0, 0, 2, 2)):
        excess = target[place].clone()
        if certain:
            excess[DRAFTS[place]] = 0
        else:
            excess = (excess - draft[place]).clamp(min=0)
        assert out[place] == (excess * weights[request]).argmax()


def test_temperatures_reach_each_draft() -> None:
    """vLLM's own function for CPUs leaves the result unwritten."""
    patches.apply(in_worker=True)
    temperatures = torch.tensor([0.5, 0.7, 0.0])
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ENDS, 5, replace_from=0, replace_to=1)
    torch.testing.assert_close(expanded, torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0]))


def test_values_are_expanded_in_place() -> None:
    out = torch.full((5,), 7)
    torch.ops._C.expand_kernel_impl(out, torch.tensor([3, 4, 0]), ENDS, 0, 9)
    assert out.tolist() == [3, 3, 3, 9, 9]


def test_the_next_token_is_the_last_that_was_sampled() -> None:
    sampled = torch.tensor([[4, 5, NO_TOKEN], [6, 500, NO_TOKEN], [NO_TOKEN] * 3, [1, 2, 3]], dtype=torch.int32)
    following, valid = empty(4), empty(4)
    discard, backup = torch.tensor([False, False, False, True]), torch.tensor([70, 71, 72, 73], dtype=torch.int32)
    on_cpu.eagle_prepare_next_token_padded_kernel[(4,)](sampled, discard, backup, following, valid, 100, 3, 4)
    assert following.tolist() == [5, 6, 72, 73]
    assert valid.tolist() == [2, 1, 0, 0]


def test_a_request_goes_on_after_its_last_kept_token() -> None:
    to_sample, rejected = empty(3), empty(3)
    starts = torch.tensor([0, 4, 5, 8], dtype=torch.int32)
    on_cpu.eagle_prepare_inputs_padded_kernel[(3,)](
        ENDS.int(), torch.tensor([2, 1, 3], dtype=torch.int32), starts, to_sample, rejected, 3
    )
    assert rejected.tolist() == [2, 0, 0]
    assert to_sample.tolist() == [1, 4, 7]


def test_a_step_further_ends_at_the_longest_length() -> None:
    positions, lengths = torch.tensor([3, 7, 9]), torch.tensor([4, 8, 10], dtype=torch.int32)
    table = torch.tensor([[5, 6, 7], [1, 2, 3], [8, 9, 4]], dtype=torch.int32)
    further, slots = torch.full((3,), -5), torch.full((5,), -5)
    on_cpu.eagle_step_slot_mapping_metadata_kernel[(5,)](positions, table, 3, lengths, further, slots, 4, 10, 3, -1)
    assert further.tolist() == [4, 8, 0]
    assert slots.tolist() == [6 * 4, 3 * 4, -1, -1, -1]
    assert lengths.tolist() == [5, 9, 1]


@pytest.mark.parametrize("shift", [False, True])
def test_what_a_drafting_model_reads(shift: bool) -> None:
    """Two requests of 4 and 3 tokens; the first has lost one. One next token and one mask each, then padding."""
    tokens, positions = torch.arange(10, 17), torch.tensor([20, 21, 22, 23, 5, 6, 7])
    starts, ends = torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([2, 6], dtype=torch.int32)
    room = 7 + 2 * (2 - int(shift))
    ids, places, new, hidden = empty(room), torch.full((room,), -5), empty(4), empty(7)
    lost, masked = (torch.zeros(room, dtype=torch.bool) for _ in range(2))
    on_cpu.copy_and_expand_eagle_inputs_kernel[(2,)](
        tokens,
        positions,
        torch.tensor([80, 81]),
        ids,
        places,
        lost,
        masked,
        new,
        hidden,
        starts,
        ends,
        0,
        99,
        7,
        2,
        shift,
    )
    first = [11, 12] if shift else [10, 11, 12]
    second = [15, 16] if shift else [14, 15, 16]
    assert ids.tolist() == [*first, 80, 99, 0, *second, 81, 99]
    assert places.tolist() == [
        *range(20, 20 + len(first) + 2), 0, *range(5, 5 + len(second) + 2)
    ]  # fmt: skip
    assert ids[masked].tolist() == [99, 99]
    assert ids[lost].tolist() == [0]
    assert ids[new.long()].tolist() == [80, 99, 81, 99]
    assert hidden.tolist() == ([0, 1, 2, 3, 5, 6, 7] if shift else [NO_TOKEN] * 7)


@pytest.mark.parametrize("rejected", [None, [1, 0]])
def test_dflash_s_inputs_are_those_of_vllm_in_python(
    rejected: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> list[torch.Tensor]:
        wide = [torch.full((8,), NO_TOKEN) for _ in range(2)]
        narrow = [torch.full((6,), NO_TOKEN) for _ in range(2)]
        ids, context_slots, query_slots = empty(6), wide[1], narrow[1]
        outs = [ids, wide[0], narrow[0], context_slots, query_slots, empty(4)]
        on_cpu.copy_and_expand_dflash_inputs_kernel[(2,)](
            torch.tensor([80, 81]), torch.tensor([20, 21, 22, 23, 5, 6, 7]), *outs,
            torch.arange(1, 21, dtype=torch.int32).view(2, 10), 10, torch.tensor([0, 4, 7], dtype=torch.int32),
            None if rejected is None else torch.tensor(rejected, dtype=torch.int32), 99, 4, 3, 2, 7,
            HAS_NUM_REJECTED=rejected is not None,
        )  # fmt: skip
        return outs

    ours = made()
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, made(), strict=True))
    assert ours[0].tolist() == [80, 99, 99, 81, 99, 99]
