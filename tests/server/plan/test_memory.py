from dataclasses import replace

import pytest

from server.plan.memory import CUDA_CONTEXT, DEQUANTIZE_TILE, NCCL_BUFFERS, Device, Run, make_plan
from server.plan.weights import Split
from server.units import GIB

from .models import model

CARD = Device("gpu", 16160 * 2**20)
RUN = Run(8192, 32, 2048, 4096, 0.90, 2, 2, 2, "packed", 16)


def test_the_reference_document_s_sums_hold_for_a_32b_model_on_two_16_gb_cards() -> None:
    plan = make_plan(model("32B"), CARD, RUN, Split(2))
    parts = {item.name: item.bytes / GIB for item in plan.items}
    assert plan.fits
    assert parts["4-bit weights"] == pytest.approx(8, abs=0.5)  # "weights 8 GB per card"
    assert 3 < plan.cache_bytes / GIB < 4.5  # "KV 3-4 GB"
    assert plan.together >= 1


def test_parts_and_cache_make_up_the_budget_exactly() -> None:
    plan = make_plan(model("27B"), CARD, RUN, Split(2))
    assert sum(item.bytes for item in plan.items) + plan.cache_bytes == plan.budget_bytes
    assert all(item.formula and item.bytes > 0 for item in (*plan.items, *plan.outside, plan.load_peak))


def test_weights_that_leave_nothing_are_refused_with_numbers_and_a_remedy() -> None:
    plan = make_plan(model("32B"), CARD, RUN, Split(1))
    (problem,) = plan.problems
    assert "of 14.20 GiB before any context: 4-bit weights 16.36 GiB" in problem
    assert "--tensor-parallel-size" in problem
    assert plan.cache_bytes == plan.together == 0


def test_a_context_that_cannot_fit_names_the_largest_that_does() -> None:
    plan = make_plan(model("14B"), CARD, replace(RUN, length=32768), Split(1))
    (problem,) = plan.problems
    longest = int(problem.rpartition(" ")[2])
    assert "--max-model-len 32768 needs 5.00 GiB of cache" in problem
    assert make_plan(model("14B"), CARD, replace(RUN, length=longest), Split(1)).fits
    assert not make_plan(model("14B"), CARD, replace(RUN, length=longest + 33), Split(1)).fits


def test_a_context_beyond_the_model_s_positions_is_refused() -> None:
    plan = make_plan(model("8B"), CARD, replace(RUN, length=50000), Split(1))
    assert "beyond the model's 40960 positions; lower it to 40960" in plan.problems[0]


def test_an_automatic_context_is_the_longest_that_fits() -> None:
    plan = make_plan(model("14B"), CARD, replace(RUN, length=0), Split(1))
    assert plan.fits
    assert plan.together == 1
    assert plan.length == plan.cache.longest(plan.cache_bytes, 1, 2048, 40960)


def test_a_share_that_leaves_no_room_for_the_context_is_refused_with_one_that_does() -> None:
    plan = make_plan(model("8B"), CARD, replace(RUN, utilization=0.98), Split(2))
    (problem,) = plan.problems
    share = float(problem.rpartition(" ")[2])
    assert CARD.memory_bytes * (1 - share) >= CUDA_CONTEXT + NCCL_BUFFERS
    assert make_plan(model("8B"), CARD, replace(RUN, utilization=share), Split(2)).fits


def test_more_sequences_or_tokens_a_step_cost_memory() -> None:
    small = make_plan(model("8B"), CARD, RUN, Split(1)).cache_bytes
    assert make_plan(model("8B"), CARD, replace(RUN, batched=16384), Split(1)).cache_bytes < small
    assert make_plan(model("8B"), CARD, replace(RUN, sequences=1024), Split(1)).cache_bytes < small


def test_a_cache_of_given_size_must_fit_too() -> None:
    assert make_plan(model("8B"), CARD, replace(RUN, cache_bytes=4 * GIB), Split(1)).cache_bytes == 4 * GIB
    assert "cache 12.00 GiB" in make_plan(model("8B"), CARD, replace(RUN, cache_bytes=12 * GIB), Split(1)).problems[0]


def test_dequantizing_at_load_peaks_above_the_weights_by_one_linear() -> None:
    qwen = model("8B")
    plan = make_plan(qwen, Device("cpu", 64 * GIB), replace(RUN, form="dense", cache_bytes=GIB), Split(1))
    largest = max(linear.rows * linear.columns for linear in qwen.linears)
    assert plan.load_peak.bytes == sum(item.bytes for item in plan.items[:2]) + 4 * largest
    assert not plan.outside


def test_a_mixture_of_experts_fits_two_16_gb_cards_by_all_its_weights_and_each_token_s_experts() -> None:
    found = model("30B-A3B")
    plan = make_plan(found, CARD, RUN, Split(2))
    parts = {item.name: item.bytes for item in plan.items}
    experts = 48 * 128 * 3 * 2048 * 768
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    assert parts["4-bit weights"] == pytest.approx((experts + attention) * 9 / 16 / 2, rel=0.01)
    # Eight experts per token, each 384 wide on a rank: gate, up and their product, or the product and the output.
    step = 2048 * (2 * 2048 + 8 * (384 + 2048)) * 2
    assert step <= parts["activations"] <= step + DEQUANTIZE_TILE
    assert plan.fits
    assert not make_plan(found, CARD, RUN, Split(1)).fits
