import pytest

from quant.evaluate.long_output import (
    PROMPTS,
    Prompt,
    broken,
    ends_in_loop,
    repetition,
    write_long,
    wrong_script,
)

PROSE = (
    "In the morning the baker lit his oven and counted the loaves that were left from the day before, while outside "
    "the first carts rolled over the bridge, slowly, because the planks were wet and the horses did not trust them yet."
)


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (PROSE, "en", 0.0),
        ("one two three four " * 3, "en", 1 - 4 / 9),
        ("春天来了春天来了", "zh", 1 - 4 / 5),
        ("三个 字", "zh", 0.0),
        ("", "en", 0.0),
    ],
)
def test_repetition_is_the_share_of_four_grams_seen_before(text, language, expected):
    assert repetition(text, language) == pytest.approx(expected)


@pytest.mark.parametrize("piece", ["a", "na", "I do not know. ", "这是一个苹果。", "x" * 59 + "y"])
def test_an_end_that_repeats_one_piece_is_a_loop(piece):
    assert ends_in_loop(PROSE + piece * 200)


@pytest.mark.parametrize("text", [PROSE, "a" * 100, PROSE + "a" * 170, ""])
def test_prose_and_short_repetitions_are_none(text):
    assert not ends_in_loop(text)


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Bread, 12 loaves!", "en", 0.0),
        ("café naïve", "en", 0.0),
        ("ab 春天", "en", 0.5),
        ("ab 春天", "zh", 0.5),
        ("Привет", "en", 1.0),
        ("123 ...", "zh", 0.0),
    ],
)
def test_letters_of_another_script_are_drift(text, language, expected):
    assert wrong_script(text, language) == expected


def test_replacement_characters_and_control_codes_are_broken_text():
    assert broken("ab\ufffd\x00") == 0.5
    assert broken("line\n\tnext\r\n") == 0.0
    assert broken("") == 0.0


def test_measures_are_means_over_the_outputs():
    outputs = {"en": PROSE, "zh": "好" * 200}
    prompts = (Prompt("a", "en"), Prompt("b", "zh"))
    asked = []

    def generate(prompt: str, tokens: int) -> str:
        asked.append((prompt, tokens))
        return outputs["en" if prompt == "a" else "zh"]

    result = write_long(generate, 300, "writing", prompts)

    assert asked == [("a", 300), ("b", 300)]
    assert result.loop == 0.5
    assert result.repetition == pytest.approx((0 + 1 - 1 / 197) / 2)
    assert (result.wrong_script, result.broken) == (0.0, 0.0)
    assert [output.text for output in result.outputs] == list(outputs.values())


def test_the_prompts_are_in_both_languages():
    assert {prompt.language for prompt in PROMPTS} == {"en", "zh"}
    for prompt in PROMPTS:
        assert wrong_script(prompt.text, prompt.language) == 0.0
