"""What the model of all-reduces computes."""

from __future__ import annotations

import pytest

from perfmodel.all_reduce_model import NCCL, OURS, Nccl, Ours, check


def test_nccl_costs_its_fixed_part_and_its_bytes() -> None:
    assert Nccl(45e-6, 10e9, "").seconds(10_000) == pytest.approx(46e-6)


def test_ours_costs_a_kernel_a_way_over_the_bus_and_lines_of_which_an_eighth_is_no_data() -> None:
    ours = Ours(kernel=3e-6, write=1e-6, read=2e-6, rate=4e9, norm=0.5e-6, source="")
    assert ours.seconds(3500) == pytest.approx(3e-6 + 1e-6 + 3e-6 + 1e-6)
    assert ours.seconds_with_norm(3500) == pytest.approx(8.5e-6)


def test_an_h200s_times_in_graphs_are_set_beside_the_models() -> None:
    rows = [{"way": "ours", "tokens": 1, "bytes": 10_240, "us_in_a_graph": 4.0}, {"way": "nccl", "tokens": 1}]
    found = check({"ways": {"shared": {"rows": rows}, "peer": {"rows": []}}})
    assert [(row["way"], row["measured_us"]) for row in found] == [("shared", 4.0)]
    assert found[0]["computed_by_measured"] == pytest.approx(found[0]["computed_us"] / 4, abs=0.01)


@pytest.mark.parametrize("gpu", sorted(NCCL))
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 102])
def test_on_v100s_ours_is_taken_where_it_is_faster(gpu: str, tokens: int) -> None:
    assert OURS[gpu].seconds(2 * 5120 * tokens) < NCCL[gpu].seconds(2 * 5120 * tokens)
