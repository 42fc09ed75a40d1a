from __future__ import annotations

import inspect

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler

from engine import patches
from engine.cpu_sampling import among_few, by_candidates, lowest_kept

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
    assert lowest_kept(row, None, p) is None
    assert lowest_kept(logits(1, 9.0), torch.tensor([2000]), torch.tensor([0.9])) is None
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
    counts = torch.bincount(among_few(never)(row), minlength=50)
    assert counts.sum() == counts[[3, 17, 40]].sum() == draws
    # Six standard deviations.
    assert torch.allclose(counts[[3, 17, 40]] / draws, torch.tensor([0.1, 0.2, 0.7]), rtol=0, atol=0.02)


def test_each_row_draws_from_its_own() -> None:
    row = torch.full((3, VOCABULARY), -torch.inf)
    row[0, 5], row[1, 7:9], row[2, VOCABULARY - 1] = 1.0, torch.tensor([-200.0, 200.0]), torch.inf
    assert among_few(never)(row).tolist() == [5, 8, VOCABULARY - 1]


def test_rows_with_many_tokens_are_left_to_vllm() -> None:
    row = logits(2, 1.0)
    assert among_few(lambda seen: torch.tensor([len(seen), 7]))(row).tolist() == [2, 7]


def test_vllm_samples_with_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.apply()
    for name in ("sort", "div"):  # which draws among all
        monkeypatch.setattr(torch.Tensor, name, never)
    sampler = topk_topp_sampler.TopKTopPSampler()
    row = torch.full((1, VOCABULARY), -10.0)
    row[0, 42] = 10.0
    token, _ = sampler.forward_cpu(row, {}, None, torch.tensor([0.9]))
    assert token.tolist() == [42]
