"""Computed speed: the tables at their own point, other models by scaling, and no figure where there is no table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from lookalikes.public_models import dense, hybrid, mixture
from quant.formats.weights import PER_TENSOR, nvfp4
from scripts import speeds as script
from server.plan.model import Linear, Model, describe, text_only
from server.plan.speed import FILE, Link, Speed, estimate, linear_bytes
from server.plan.weights import Split

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/results"
LINKS: tuple[Link, ...] = get_args(Link)


def model(shape: tuple[dict[str, Any], dict[str, Any]]) -> Model:
    return text_only(describe(*shape, "config.json"))


def graphs(file: str, part: str, gpu: str) -> float:
    rows = json.loads((RESULTS / file).read_text())[part]
    return float(next(row["graphs_tokens_s"] for row in rows if (row["gpu"], row["streams"]) == (gpu, 1)))


def test_the_file_is_what_the_result_files_say() -> None:
    assert FILE.read_text(encoding="utf-8") == script.content()


@pytest.mark.parametrize("link", LINKS)
def test_at_its_own_point_a_table_says_what_its_result_says(link: Link) -> None:
    for shape, pattern, part in ((dense("32B"), "v100-32b-*.json", "rows"), (hybrid(), "v100-27b-*.json", "decoding")):
        high = estimate(model(shape), Split(2, 1), link).high
        assert high == pytest.approx(graphs(script.newest(pattern).name, part, f"v100-{link}"), rel=0.002)


def test_a_smaller_model_is_faster_and_one_card_slower() -> None:
    large, small = model(dense("32B")), model(dense("14B"))
    both = estimate(large, Split(2, 1), "pcie")
    assert estimate(small, Split(2, 1), "pcie").high > both.high > estimate(large, Split(1, 1), "pcie").high
    assert estimate(small, Split(2, 1), "pcie").low > both.low


def test_the_pessimistic_end_is_below_the_slowest_peer() -> None:
    speed = estimate(model(hybrid()), Split(2, 1), "sxm2")
    assert speed.low <= 39.6 < speed.high
    assert speed.as_dict()["provenance"] == "computed"


def test_8_bit_linears_and_a_4_bit_head_count_by_their_bytes() -> None:
    base = model(dense("8B"))
    fp8 = replace(base, linears=tuple(replace(one, kind=PER_TENSOR) for one in base.linears))
    head = Linear("lm_head", 151936, 4096, nvfp4(16))
    small = replace(base, linears=(*base.linears, head))
    plain, eights, small_head = (estimate(one, Split(2, 1), "pcie").high for one in (base, fp8, small))
    assert 1 / 1.8 < eights / plain < 0.75
    assert plain < small_head < 1.2 * plain
    assert linear_bytes(small, Split(1)) == linear_bytes(base, Split(1))


def test_one_card_reduces_nothing() -> None:
    links = [estimate(model(dense("8B")), Split(1, 1), link).high for link in LINKS]
    assert links[0] == pytest.approx(links[1], rel=0.03)


@pytest.mark.parametrize(
    ("shape", "split", "why"),
    [
        (mixture(), Split(2, 1), "mixtures of experts"),
        (dense("32B"), Split(4, 1), "one and two cards"),
        (dense("32B"), Split(1, 2), "one and two cards"),
        (({**dense("8B")[0]}, {}), Split(1, 1), "neither NVFP4 nor FP8"),
    ],
    ids=["experts", "four cards", "stages", "16 bits"],
)
def test_without_a_table_there_is_no_figure(
    shape: tuple[dict[str, Any], dict[str, Any]], split: Split, why: str
) -> None:
    speed = estimate(model(shape), split, "pcie")
    assert why in speed.unknown
    assert why in speed.as_text()
    assert speed.as_dict().keys() == {"unknown"}


def test_a_range_is_shown_as_one() -> None:
    assert str(Speed(37.4, 60.1, "file")) == "37–60 tok/s"
