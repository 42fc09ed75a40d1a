from dataclasses import replace

import pytest

from server.plan.compare import compare, recommend
from server.plan.weights import Split

from .models import model
from .test_memory import CARD, RUN


@pytest.mark.parametrize(
    ("name", "gpus", "choice", "reason"),
    [
        ("8B", 1, "TP=1", "no token waits"),
        ("8B", 2, "TP=1", "other cards can each run a copy"),
        ("32B", 2, "TP=2", "tensor parallelism"),
        ("32B", 4, "TP=2", "the fewest cards"),
        ("27B", 2, "TP=2", "tensor parallelism"),
        ("32B", 1, "none", "needs 2 such GPUs"),
    ],
)
def test_the_fewest_cards_that_hold_the_model_are_recommended(name: str, gpus: int, choice: str, reason: str) -> None:
    decision = recommend(compare(model(name), CARD, RUN), gpus)
    assert decision.choice == choice
    assert reason in decision.reason


def test_pipeline_parallelism_is_for_models_that_cannot_be_cut() -> None:
    odd = replace(model("32B"), heads=63)
    decision = recommend(compare(odd, CARD, RUN), 2)
    assert decision.choice == "TP=1 PP=2"
    assert "num_attention_heads=63" in decision.reason


def test_a_model_too_large_for_any_split_needs_larger_cards() -> None:
    huge = replace(model("32B"), vocabulary=10**9)
    decision = recommend(compare(huge, CARD, RUN), 4)
    assert decision.choice == "none"
    assert "a larger card" in decision.reason


def test_all_of_tp_1_2_4_and_pp_are_compared() -> None:
    assert {option.split for option in compare(model("8B"), CARD, RUN)} >= {Split(1), Split(2), Split(4), Split(1, 2)}
