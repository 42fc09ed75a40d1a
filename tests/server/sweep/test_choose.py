from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config.devices import Devices
from server.config.presets import load_preset, load_presets
from server.config.settings import load_config
from server.sweep.choose import Candidate, as_preset, candidates, pareto, winner, write_preset
from server.sweep.store import Record

RATES = st.floats(0.1, 1000)


def measured(point: dict[str, object], **rates: tuple[float, float | None]) -> Record:
    levels = tuple(
        {"level": level, "tokens_per_s": total, "user_tokens_per_s": user} for level, (total, user) in rates.items()
    )
    return Record(point, "measured", "", None, 20.0, levels)


def candidate(total: float, user: float) -> Candidate:
    return Candidate(measured({"max-num-seqs": 8}), "×8", total, user)


def dominates(one: Candidate, other: Candidate) -> bool:
    return one.total >= other.total and one.user >= other.user and (one.total, one.user) != (other.total, other.user)


@given(st.lists(st.tuples(RATES, RATES), min_size=1, max_size=30))
def test_the_front_is_what_no_other_point_beats_in_both(rates: list[tuple[float, float]]) -> None:
    found = [candidate(total, user) for total, user in rates]
    front = pareto(found)
    assert not any(dominates(one, other) for one in found for other in front)
    on_front = {(one.total, one.user) for one in front}
    for one in found:
        assert (one.total, one.user) in on_front or any(dominates(other, one) for other in front)


@given(st.lists(st.tuples(RATES, RATES), max_size=30), RATES)
def test_the_best_has_the_largest_total_of_those_fast_enough_for_each_user(
    rates: list[tuple[float, float]], least: float
) -> None:
    best = winner([candidate(total, user) for total, user in rates], least)
    allowed = [total for total, user in rates if user >= least]
    assert (best.total if best else None) == max(allowed, default=None)


def test_only_measured_points_with_a_users_figure_are_candidates() -> None:
    records = [
        measured({"a": 1}, x1=(5.0, 5.0), x8=(20.0, None)),
        Record({"a": 2}, "failed", "out of memory"),
        Record({"a": 3}, "skipped", "does not fit"),
    ]
    assert [(one.level, one.total) for one in candidates(records)] == [("x1", 5.0)]


def test_the_best_becomes_a_preset_that_says_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    arguments = ["--model", "m", "--max-model-len", "2048", "--preset", "cpu-smoke"]
    config = load_config(arguments, {}, lambda: Devices((), "none here"))
    point = {"max-num-seqs": 4, "dtype": "bfloat16", "enforce-eager": True, "OMP_NUM_THREADS": "1"}
    chosen = Candidate(measured(point), "×8", 57.8, 7.0)
    base = load_presets()["cpu-smoke"]
    path = write_preset(tmp_path, as_preset(base, config, chosen, "57.8 tok/s at ×8"), "Written by a test.")
    preset = load_preset(path)
    assert preset.name == path.stem == "cpu-smoke-swept"
    varied = {"dtype": "bfloat16", "enforce-eager": True, "max-num-seqs": 4}
    assert preset.flags() == {**base.flags(), **varied, "max-model-len": 2048}
    assert preset.limits["max-num-seqs"].provenance == "measured"
    assert preset.limits["max-num-seqs"].source == "57.8 tok/s at ×8"
    assert "max-model-len" not in preset.limits, "what was given, not varied, is not called measured"
    assert preset.env["OMP_NUM_THREADS"] == "1"
    assert preset.env["LD_PRELOAD"] == base.env["LD_PRELOAD"]
    served = load_config(["--model", "m", "--preset", str(path)], {}, lambda: Devices((), "none here"))
    assert served.engine["max-num-seqs"] == 4
    assert served.env["OMP_NUM_THREADS"] == "1"


def test_every_gpu_preset_can_be_the_base_of_a_swept_one(tmp_path: Path) -> None:
    config = load_config(["--model", "m", "--preset", "cpu-smoke"], {}, lambda: Devices((), "none here"))
    chosen = Candidate(measured({"gpu-memory-utilization": 0.95, "enforce-eager": False}), "×32", 140.0, 4.4)
    for base in load_presets().values():
        data = as_preset(base, config, chosen, "140 tok/s at ×32")
        preset = load_preset(write_preset(tmp_path, data, "Written by a test."))
        assert preset.match == base.match
        assert preset.flags()["gpu-memory-utilization"] == pytest.approx(0.95)
        assert preset.flags()["enforce-eager"] is False
