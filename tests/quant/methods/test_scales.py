from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.methods.scales import POLICIES, fourosix, maxabs, mse, quasar
from tests.quant.reference import E2M1, E4M3, E4M3_NAN, nearest_index


def magnitudes(rows: int = 16, blocks: int = 4, group_size: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(rows, blocks, 1, generator=generator) * 200 + 1
    return torch.randn(rows, blocks, group_size, generator=generator).abs() * size


def errors(blocks: torch.Tensor, codes: torch.Tensor, importance: torch.Tensor | None = None) -> np.ndarray:
    """The error of each block under its scale, in float64 and without the code under test."""
    scale = E4M3[codes.numpy().astype(int)][..., None]
    exact = blocks.double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scale > 0, exact / scale, 0.0)
    rounded = E2M1[nearest_index(E2M1, scaled.ravel())].reshape(exact.shape)
    weights = 1.0 if importance is None else importance.double().numpy()
    errors: np.ndarray[tuple[Any, ...], np.dtype[Any]] = (weights * (rounded * scale - exact) ** 2).sum(-1)
    return errors


def random_importance(blocks: int = 4, group_size: int = 16) -> torch.Tensor:
    return torch.rand(blocks, group_size, generator=torch.Generator().manual_seed(9)) ** 4 * 100


def test_fourosix_takes_the_better_of_the_scales_for_six_and_for_four():
    blocks = magnitudes()
    largest = blocks.amax(-1).double().numpy()
    six, four = (
        torch.from_numpy(nearest_index(E4M3, (largest / target).ravel()).reshape(largest.shape)) for target in (6, 4)
    )

    chosen = fourosix(blocks).int()

    assert set((chosen == six).unique().tolist()) == {True, False}
    assert bool(((chosen == six) | (chosen == four)).all())
    np.testing.assert_allclose(errors(blocks, chosen), np.minimum(errors(blocks, six), errors(blocks, four)), rtol=1e-5)


def test_quasar_errs_less_than_maxabs_in_every_block_where_it_matters():
    blocks, importance = magnitudes(), random_importance()

    ours, plain = (errors(blocks, codes, importance) for codes in (quasar(blocks, importance), maxabs(blocks)))

    assert (ours <= plain * (1 + 1e-5)).all()
    assert ours.sum() < 0.7 * plain.sum()


def test_quasar_comes_close_to_the_best_of_all_scales():
    blocks, importance = magnitudes(), random_importance()
    best = np.min([errors(blocks, torch.full((16, 4), code), importance) for code in range(127)], axis=0)

    ours = errors(blocks, quasar(blocks, importance), importance)

    assert ours.sum() < 1.1 * best.sum()


def test_quasar_gives_up_a_column_without_importance():
    blocks = torch.full((1, 1, 16), 6.0)
    blocks[0, 0, 3] = 8.5
    importance = torch.ones(1, 16)

    importance[0, 3] = 0.0
    ignored = quasar(blocks, importance)

    assert errors(blocks, ignored, importance).item() == 0


def test_quasar_treats_a_block_without_any_importance_as_all_alike():
    blocks = magnitudes()

    none = quasar(blocks, torch.zeros(4, 16))

    assert torch.equal(none, quasar(blocks, torch.ones(4, 16)))


def test_quasar_without_importance_is_refused():
    with pytest.raises(ValueError, match=r"importance: expected float32 \[B, g\] for the quasar policy, got None"):
        quasar(magnitudes())


def test_importance_decides_what_mse_keeps_exact():
    blocks = torch.full((1, 1, 16), 1.0)
    blocks[0, 0, 0] = 5.0
    importance = torch.full((1, 16), 1e-6)
    importance[0, 0] = 1.0

    code = mse(blocks, importance)

    assert errors(blocks, code, importance).item() < 1e-4


@given(st.lists(st.floats(0, 2688, width=32), min_size=16, max_size=16), st.sampled_from(sorted(POLICIES)))
def test_no_policy_ever_errs_more_than_maxabs_or_picks_nan(values, policy):
    blocks = torch.tensor(values).view(1, 1, 16)
    importance = torch.ones(1, 16) if policy == "quasar" else None

    code = POLICIES[policy](blocks, importance)

    assert int(code) < E4M3_NAN
    assert errors(blocks, code).item() <= errors(blocks, maxabs(blocks)).item() * (1 + 1e-4) + 1e-9
