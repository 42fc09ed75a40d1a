"""A question set: common sense, reasoning, code and mathematics, in English and Chinese (questions.json, our own).

Each question is a prompt with a few continuations, one of them right. A model's answer is the continuation with the
highest mean log-probability per byte, so that length does not decide. Accuracy moves in steps of one question.
`confidence` shows smaller shifts too: it is the mean probability of the right answer among the choices, by a softmax
over their total log-probabilities.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quant.parallel import map_single_threaded
from quant.progress import OnProgress, Progress, ignore_progress

_FILE = Path(__file__).with_name("questions.json")
# The total log-probability, in nats, of a continuation after a prompt.
Scorer = Callable[[str, str], float]


@dataclass(frozen=True)
class Question:
    """`choices` continue `prompt` literally. `answer` is the index of the right one."""

    id: str
    category: str
    language: str
    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class QuestionsResult:
    """`accuracy` and `confidence` of all questions, and by category and language ("code", "zh", ...); `wrong`: ids."""

    questions: int
    accuracy: float
    confidence: float
    accuracy_by: dict[str, float]
    wrong: tuple[str, ...]


@lru_cache(maxsize=1)
def load_questions() -> tuple[Question, ...]:
    """The question set, in the file's order."""
    entries = json.loads(_FILE.read_text(encoding="utf-8"))["questions"]
    return tuple(Question(**{**entry, "choices": tuple(entry["choices"])}) for entry in entries)


def ask(
    score: Scorer, questions: Sequence[Question], what: str, on_progress: OnProgress = ignore_progress
) -> QuestionsResult:
    """Asks a model `questions` through `score`, several at once. `what` names the step in progress."""
    done = 0

    def answer(question: Question) -> tuple[bool, float]:
        nonlocal done
        totals = [score(question.prompt, choice) for choice in question.choices]
        by_byte = [total / len(choice.encode()) for total, choice in zip(totals, question.choices, strict=True)]
        largest = max(totals)
        weights = [math.exp(total - largest) for total in totals]
        done += 1
        on_progress(Progress(what, done, len(questions), "questions"))
        return by_byte.index(max(by_byte)) == question.answer, weights[question.answer] / sum(weights)

    answers = map_single_threaded(answer, questions)
    right = [correct for correct, _ in answers]
    groups = sorted({question.category for question in questions}) + sorted(
        {question.language for question in questions}
    )
    accuracy_by = {}
    for group in groups:
        members = [
            correct
            for correct, question in zip(right, questions, strict=True)
            if group in (question.category, question.language)
        ]
        accuracy_by[group] = sum(members) / len(members)
    return QuestionsResult(
        len(questions),
        sum(right) / len(right),
        sum(confidence for _, confidence in answers) / len(answers),
        accuracy_by,
        tuple(question.id for correct, question in zip(right, questions, strict=True) if not correct),
    )
