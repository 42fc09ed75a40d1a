from collections import Counter

import pytest

from quant.evaluate.questions import Question, ask, load_questions

QUESTIONS = (
    Question("a", "code", "en", "p", (" yes", " no"), 0),
    Question("b", "code", "zh", "q", ("是", "不是"), 1),
)


def test_the_set_covers_every_category_in_both_languages():
    questions = load_questions()

    counted = Counter((question.category, question.language) for question in questions)
    categories = ("common_sense", "reasoning", "code", "mathematics")
    assert set(counted) == {(category, language) for category in categories for language in ("en", "zh")}
    assert len(questions) >= 40
    assert min(counted.values()) >= 3


def test_every_question_has_distinct_choices_and_one_answer():
    questions = load_questions()

    assert len({question.id for question in questions}) == len(questions)
    assert len({question.prompt for question in questions}) == len(questions)
    for question in questions:
        assert len(set(question.choices)) == len(question.choices) >= 3
        assert 0 <= question.answer < len(question.choices)
    places = Counter(question.answer for question in questions)
    assert max(places.values()) < 0.5 * len(questions)


def test_the_likeliest_by_byte_is_the_answer_and_its_share_the_confidence():
    scores = {("p", " yes"): -4.0, ("p", " no"): -6.0, ("q", "是"): -3.0, ("q", "不是"): -9.0}

    result = ask(lambda prompt, choice: scores[prompt, choice], QUESTIONS, "asking")

    assert result.accuracy == 0.5
    assert result.wrong == ("b",)
    assert result.accuracy_by == {"code": 0.5, "en": 1.0, "zh": 0.0}
    assert result.confidence == pytest.approx((1 / (1 + 2.718281828**-2) + 2.718281828**-6 / (1 + 2.718281828**-6)) / 2)


def test_length_does_not_decide():
    scores = {("p", " yes"): -8.0, ("p", " no"): -9.0, ("q", "是"): -4.0, ("q", "不是"): -5.0}

    result = ask(lambda prompt, choice: scores[prompt, choice], QUESTIONS, "asking")

    assert result.accuracy == 1.0


def test_impossible_choices_do_not_overflow():
    result = ask(lambda prompt, choice: -1e5 if choice == " yes" else -2e5, QUESTIONS[:1], "asking")

    assert (result.accuracy, result.confidence) == (1.0, 1.0)
