"""Answers of two engines compared: where texts may part, and what a difference is put down to."""

from __future__ import annotations

from typing import Any

import pytest

from trials.compare import compare, first_difference, noise


def text(*tokens: int, shift: float = 0.0) -> list[dict[str, Any]]:
    likely = {str(token): -0.5 - 0.04 * index for index, token in enumerate((1, 2))} | {"3": -4.0}
    return [{"token": token, "logprob": likely[str(token)] + shift, "top": likely} for token in tokens]


def answers(*texts: list[dict[str, Any]], perplexity: float = 10.0) -> dict[str, Any]:
    return {"alone": list(texts), "together": list(texts), "perplexity": perplexity, "perplexity_tokens": 5}


@pytest.mark.parametrize(
    ("other", "passed"),
    [
        (answers(text(1, 1, 2)), True),
        (answers(text(1, 2, 3)), True),  # parted where both were almost equally likely
        (answers(text(1, 3, 2)), False),  # parted towards an unlikely token
        (answers(text(1, 1, 2), perplexity=10.04), True),
        (answers(text(1, 1, 2), perplexity=9.94), False),
    ],
)
def test_texts_may_part_only_where_rounding_decides(other: dict[str, Any], passed: bool) -> None:
    assert compare(answers(text(1, 1, 2)), other)["passed"] is passed


def test_a_token_beyond_the_likeliest_explains_nothing() -> None:
    other = text(1, 1)
    other[1]["token"] = 77
    assert first_difference(text(1, 1), other) == {"token": 1, "tokens": [1, 77], "gap": None}


def test_the_noise_is_taken_before_texts_part() -> None:
    other = [*text(1, shift=0.02), *text(2), *text(1, shift=9.0)]
    assert noise(text(1, 1, 1), other) == pytest.approx(0.02)
