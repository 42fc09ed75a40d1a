"""Where clocks are read in a copy of the decoding kernel, and what is made of them: no GPU."""

import pytest
import torch

from kernels.tools.attention_clocks import POINTS, summary, with_points
from kernels.tools.native import ROOT

SOURCE = ROOT / "kernels" / "cuda" / "attention" / "decode.cuh"


def test_every_point_has_its_place_in_the_kernel() -> None:
    text = with_points(SOURCE.read_text())
    for index in range(len(POINTS)):
        assert text.count(f"  read_clock({index}, ") + text.count(f"\nread_clock({index}, ") == 1


def test_a_point_whose_place_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match=r"the block table is there: expected '  reader\.load_keys"):
        with_points(SOURCE.read_text().replace("load_keys(work.first_tile, k);", "load_all_keys(k);"))


def test_moments_count_from_the_first_warps_start_and_only_where_a_warp_came() -> None:
    clocks = torch.zeros(3, len(POINTS), dtype=torch.int64)
    clocks[0] = torch.arange(len(POINTS)) * 1000 + 5000
    clocks[1, :2] = torch.tensor([5064, 9000])  # has no split
    found = summary(clocks)
    assert found["start"] == {"warps": 2, "first": 0.0, "median": 0.03, "last": 0.06}
    assert found["its split is known"] == {"warps": 2, "first": 1.0, "median": 2.5, "last": 4.0}
    assert found["its sums are left"] == {"warps": 1, "first": 5.0, "median": 5.0, "last": 5.0}
