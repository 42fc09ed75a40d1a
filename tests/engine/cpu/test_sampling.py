from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops import topk_topp_sampler

from engine import patches
from engine.cpu.sampling import CANDIDATES, by_candidates, draw, lowest_kept

VOCABULARY = 5000
WITHOUT_K = VOCABULARY


def vllm(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, allow_cpu_sync: bool) -> torch.Tensor:
    """Sorting, as vLLM does it, whether it is patched by now or not."""
    masked: torch.Tensor = inspect.unwrap(topk_topp_sampler.apply_top_k_top_p_pytorch)(logits, k, p, allow_cpu_sync)
    return masked


def never(*_arguments: object) -> torch.Tensor:
    pytest.fail("the likeliest tokens were thought not to decide it")


def logits(rows: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("spread", [3.0, 15.0])
@pytest.mark.parametrize("k", [None, [1, 7, 1000, WITHOUT_K]], ids=["", "top-k"])
def test_what_stays_is_what_sorting_leaves(spread: float, k: list[int] | None) -> None:
    top_k = None if k is None else torch.tensor(k, dtype=torch.int32)
    top_p = torch.tensor([0.9, 0.5, 0.05, 0.8])
    row = logits(4, spread)
    expected = vllm(row.clone(), top_k, top_p, allow_cpu_sync=True)
    got = by_candidates(never)(row.clone(), top_k, top_p, allow_cpu_sync=True)
    assert torch.equal(got, expected)
    assert expected.isfinite().sum(1).min() < 100


def test_a_row_without_top_p_keeps_all() -> None:
    row = logits(3, 10.0)
    got = by_candidates(never)(row.clone(), None, torch.tensor([1.0, 0.5, 1.0]))
    assert torch.equal(got[[0, 2]], row[[0, 2]])
    assert got[1].isfinite().sum() < 100


def test_likelihoods_too_even_for_the_likeliest_to_decide_are_left_to_vllm() -> None:
    row, p = logits(2, 0.1), torch.tensor([0.9, 0.9])
    assert not lowest_kept(row, None, p)[1].any()
    assert not lowest_kept(logits(1, 9.0), torch.tensor([2000]), torch.tensor([0.9]))[1].any()
    assert torch.equal(by_candidates(vllm)(row.clone(), None, p), vllm(row.clone(), None, p, False))


def test_masked_tokens_stay_masked() -> None:
    row = logits(1, 10.0)
    row[:, 100:] = -torch.inf
    got = by_candidates(never)(row.clone(), None, torch.tensor([0.99]))
    assert torch.equal(got, vllm(row.clone(), None, torch.tensor([0.99]), False))


def test_a_vocabulary_smaller_than_the_candidates() -> None:
    row = logits(2, 0.5)[:, :50]
    p = torch.tensor([0.9, 0.3])
    assert torch.equal(by_candidates(never)(row.clone(), None, p), vllm(row.clone(), None, p, False))


def test_few_tokens_are_drawn_as_likely_as_they_are() -> None:
    torch.manual_seed(0)
    draws = 20_000
    row = torch.full((draws, 50), -torch.inf)
    row[:, [3, 17, 40]] = torch.tensor([0.1, 0.2, 0.7]).log() + 5
    counts = torch.bincount(draw(row, {}), minlength=50)
    assert counts.sum() == counts[[3, 17, 40]].sum() == draws
    # Six standard deviations.
    assert torch.allclose(counts[[3, 17, 40]] / draws, torch.tensor([0.1, 0.2, 0.7]), rtol=0, atol=0.02)


def test_each_row_draws_from_its_own() -> None:
    row = torch.full((3, VOCABULARY), -torch.inf)
    row[0, 5], row[1, 7:9], row[2, VOCABULARY - 1] = 1.0, torch.tensor([-200.0, 200.0]), torch.inf
    assert draw(row, {}).tolist() == [5, 8, VOCABULARY - 1]


def test_rows_with_many_tokens_are_drawn_as_likely_as_they_are() -> None:
    torch.manual_seed(0)
    row = torch.zeros(400, 2 * CANDIDATES)
    row[:, 0] = torch.tensor(2.0 * CANDIDATES).log()  # as likely as the others together
    assert 140 < (draw(row, {}) == 0).sum() < 260  # six standard deviations


def test_a_row_decided_beside_one_that_is_not_stays_as_it_is_alone() -> None:
    even, peaked, p = logits(1, 0.1), logits(1, 9.0), torch.tensor([0.9])
    alone = by_candidates(never)(peaked.clone(), None, p)
    beside = by_candidates(vllm)(torch.cat([even, peaked, even]), None, p.expand(3))
    assert torch.equal(beside[1:2], alone)
    assert torch.equal(beside[:1], vllm(even.clone(), None, p, True))


def forward(rows: torch.Tensor, seeds: dict[int, int], p: float | None) -> torch.Tensor:
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    top_p = None if p is None else torch.full((len(rows),), p)
    patches.apply()
    tokens: torch.Tensor = topk_topp_sampler.TopKTopPSampler().forward_cpu(rows.clone(), generators, None, top_p)[0]
    return tokens


@pytest.mark.parametrize("p", [None, 0.9])
@pytest.mark.parametrize("mates", [0.1, 3.0, 30.0], ids=["even", "middling", "peaked"])
def test_a_seed_gives_the_same_token_in_any_company(mates: float, p: float | None) -> None:
    rows = torch.cat([logits(1, 3.0), logits(6, mates, seed=1)])
    for seed in range(4):
        alone = forward(rows[:1], {0: seed}, p)
        for company in (2, 3, 7):
            for others in ({}, {row: 100 + row for row in range(1, company)}, {1: 5}):
                assert forward(rows[:company], {0: seed, **others}, p)[0] == alone[0]
    assert len({forward(rows[:1], {0: seed}, p).item() for seed in range(30)}) > 1


EXTREME = st.one_of(
    st.sampled_from([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 3.4e38, -3.4e38, 1e-38, 1e-45]),
    st.floats(width=32),
)
SMALL = [1e-300, 5e-324, 1e-38, 1e-45, 1.0, 0.999999, 0.5]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_row_keeps_a_token_and_gets_one_whatever_its_numbers_are(data: st.DataObject) -> None:
    rows, vocabulary = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    row = torch.tensor(data.draw(st.lists(EXTREME, min_size=rows * vocabulary, max_size=rows * vocabulary)))
    row = row.reshape(rows, vocabulary)
    p = torch.tensor(data.draw(st.lists(st.sampled_from(SMALL), min_size=rows, max_size=rows)))
    with_k = data.draw(st.booleans())
    k = torch.tensor(data.draw(st.lists(st.integers(1, vocabulary), min_size=rows, max_size=rows)))
    masked = by_candidates(vllm)(row.clone(), k if with_k else None, p)
    possible = row.amax(1) > -torch.inf  # no NaN, and not all masked
    assert (masked[possible] > -torch.inf).any(1).all()
    likeliest = row.argmax(1)[possible]
    assert (masked[possible].gather(1, likeliest[:, None]) > -torch.inf).all()
    tokens = draw(masked, {0: torch.Generator().manual_seed(1)})
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert (masked[possible].gather(1, tokens[possible][:, None]) > -torch.inf).all()


@pytest.mark.parametrize("p", SMALL[:4])
def test_the_least_top_p_keeps_the_likeliest(p: float) -> None:
    row = logits(3, 5.0)
    kept = by_candidates(never)(row.clone(), None, torch.full((3,), p)).isfinite()
    assert kept.sum(1).tolist() == [1, 1, 1]
    assert torch.equal(kept.int().argmax(1), row.argmax(1))


def test_vllm_samples_with_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.apply()
    monkeypatch.setattr(torch.Tensor, "sort", never)
    sampler = topk_topp_sampler.TopKTopPSampler()
    row = torch.full((1, VOCABULARY), -10.0)
    row[0, 42] = 10.0
    token, _ = sampler.forward_cpu(row, {}, None, torch.tensor([0.9]))
    assert token.tolist() == [42]
