"""Measures of long outputs. 4-bit errors add up: a model that drifts repeats itself or leaves its language.

Each prompt is continued greedily for a few hundred tokens. The continuations are measured as text:

    repetition    share of 4-grams (of words; of characters in Chinese) that occurred before in the same output
    loop          share of outputs that end in a loop: at most 60 characters, repeated to fill the last 180
    wrong_script  share of letters outside the prompt's script (Latin for English, Han for Chinese)
    broken        share of characters that are U+FFFD or control codes
"""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quant.progress import OnProgress, Progress, ignore_progress

_GRAM = 4
_LOOP_PIECE, _LOOP_SPAN = 60, 180
# Maps a prompt to its greedy continuation of at most the given number of tokens.
Generator = Callable[[str, int], str]


@dataclass(frozen=True)
class Prompt:
    """The text to continue, and its language: "en" or "zh"."""

    text: str
    language: str


PROMPTS = (
    Prompt(
        "The history of bread begins long before the first ovens were built. In the earliest villages, people", "en"
    ),
    Prompt("To repair a flat bicycle tyre, first remove the wheel. Then", "en"),
    Prompt('def primes(limit):\n    """All primes below limit, by the sieve of Eratosthenes."""\n', "en"),
    Prompt("Once upon a time a fox and a heron agreed to cross the river together. The fox said", "en"),
    Prompt("春天来了，公园里的花都开了。孩子们", "zh"),
    Prompt("做西红柿炒鸡蛋的步骤如下：第一步，", "zh"),
)


@dataclass(frozen=True)
class Output:
    """One continuation and its measures (the module's docstring)."""

    prompt: str
    language: str
    text: str
    repetition: float
    loop: bool
    wrong_script: float
    broken: float


@dataclass(frozen=True)
class LongOutputResult:
    """Means over the outputs; `loop` is a share of them."""

    repetition: float
    loop: float
    wrong_script: float
    broken: float
    outputs: tuple[Output, ...]


def write_long(
    generate: Generator,
    tokens: int,
    what: str,
    prompts: Sequence[Prompt] = PROMPTS,
    on_progress: OnProgress = ignore_progress,
) -> LongOutputResult:
    """Lets a model continue `prompts` by `tokens` tokens each. `what` names the step in progress."""
    outputs = []
    for prompt in prompts:
        text = generate(prompt.text, tokens)
        outputs.append(
            Output(
                prompt.text,
                prompt.language,
                text,
                repetition(text, prompt.language),
                ends_in_loop(text),
                wrong_script(text, prompt.language),
                broken(text),
            )
        )
        on_progress(Progress(what, len(outputs), len(prompts), "outputs"))
    count = len(outputs)
    return LongOutputResult(
        repetition=sum(output.repetition for output in outputs) / count,
        loop=sum(output.loop for output in outputs) / count,
        wrong_script=sum(output.wrong_script for output in outputs) / count,
        broken=sum(output.broken for output in outputs) / count,
        outputs=tuple(outputs),
    )


def repetition(text: str, language: str) -> float:
    """The share of 4-grams that occurred before; 0 for a text too short to have two."""
    units = [character for character in text if not character.isspace()] if language == "zh" else text.split()
    grams = [tuple(units[start : start + _GRAM]) for start in range(len(units) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def ends_in_loop(text: str) -> bool:
    """Whether the last 180 characters are one piece of at most 60 over and over (three times or more)."""
    tail = text[-_LOOP_SPAN:]
    if len(tail) < _LOOP_SPAN:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, _LOOP_PIECE + 1))


def wrong_script(text: str, language: str) -> float:
    """The share of letters outside the language's script, such as Latin ones in Chinese; 0 without letters."""
    wanted = "CJK UNIFIED IDEOGRAPH" if language == "zh" else "LATIN"
    letters = [character for character in text if character.isalpha()]
    wrong = [character for character in letters if not unicodedata.name(character, "").startswith(wanted)]
    return len(wrong) / len(letters) if letters else 0.0


def broken(text: str) -> float:
    """The share of replacement characters and of control codes. Line breaks and tabs do not count."""
    printable = text.translate(dict.fromkeys(map(ord, "\n\r\t"), " "))
    bad = [one for one in printable if one == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(one) == "Cc"]
    return len(bad) / len(text) if text else 0.0
