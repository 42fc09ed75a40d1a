from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from engine import patches
from engine.requests.rows import NO_TOKEN, feeding_tokens, without_token

VOCABULARY = 50
HOPELESS = {"all masked": -torch.inf, "NaN": torch.nan}


def sampler() -> Any:
    from vllm.v1.sample import sampler as module

    patches.apply()
    return module.Sampler()


def metadata(rows: int, temperature: float | None) -> SamplingMetadata:
    none = torch.zeros(rows)
    return SamplingMetadata(
        temperature=None if temperature is None else torch.full((rows,), temperature),
        all_greedy=temperature is None,
        all_random=temperature is not None,
        top_p=None if temperature is None else torch.full((rows,), 0.9),
        top_k=None,
        generators={},
        max_num_logprobs=2,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[]] * rows,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@pytest.mark.parametrize("temperature", [None, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", HOPELESS.values(), ids=HOPELESS)
def test_a_row_that_no_token_can_be_drawn_from_is_marked_and_the_others_are_sampled(
    value: float, temperature: float | None
) -> None:
    logits = torch.full((3, VOCABULARY), -50.0)
    logits[0, 7] = logits[2, 9] = 50.0
    logits[1] = value
    output = sampler()(logits, metadata(3, temperature))
    assert output.sampled_token_ids.tolist() == [[7], [NO_TOKEN], [9]]


def test_one_nan_is_enough_and_infinity_is_none() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, :-1] = -torch.inf
    assert without_token(logits).tolist() == [False, True, False, False]


def test_with_drafts_nothing_is_marked() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    output = sampler()(logits, metadata(1, None), predict_bonus_token=True)
    assert output.sampled_token_ids.min() >= 0


def runner(sampled: torch.Tensor | None, receiving: Any = None) -> Any:
    return SimpleNamespace(input_batch=SimpleNamespace(prev_sampled_token_ids=sampled), _pp_recv_work=receiving)


def test_a_stage_reads_its_tokens_only_after_they_have_arrived() -> None:
    tokens = torch.tensor([[0]])
    seen: list[torch.Tensor] = []
    prepare = feeding_tokens(lambda runner, *_: seen.append(runner.input_batch.prev_sampled_token_ids))
    prepare(runner(tokens, SimpleNamespace(wait=lambda: tokens.fill_(5))), "scheduled")
    assert seen[0].tolist() == [[5]]


def test_a_mark_never_becomes_the_next_steps_input() -> None:
    seen: list[torch.Tensor | None] = []
    prepare = feeding_tokens(lambda runner, *_: seen.append(runner.input_batch.prev_sampled_token_ids))
    on_its_way = torch.tensor([[5], [NO_TOKEN]])
    prepare(runner(on_its_way), "scheduled")
    prepare(runner(None), "scheduled")
    assert seen[0] is not None
    assert seen[0].tolist() == [[5], [0]]
    assert seen[1] is None
    assert on_its_way.tolist() == [[5], [NO_TOKEN]]  # which the host is to see
