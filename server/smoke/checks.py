"""Questions to a running service, and bounds for its answers that every working model keeps.

A model whose weights were read wrongly answers with words of all languages, broken characters or one word for ever. Its
perplexity on plain English approaches its vocabulary's size the more it guesses. A sound small model loops and mixes
languages now and then.
"""

import math
import os
from dataclasses import dataclass, field
from typing import Any

import httpx

from quant.evaluate.long_output import PROMPTS, LongOutputResult, write_long
from quant.progress import OnProgress
from server.environment import API_KEY
from server.run.child import Service, ServiceFailedError
from server.scrape import Metrics
from server.smoke.steps import Result, Verdict, worst

PLAIN_ENGLISH = (
    "The sun rises in the east and sets in the west. Water boils when it is heated and freezes when it is cold. "
    "In spring the days grow longer, the snow melts, and the farmers begin to work in their fields again."
)
MAX_PERPLEXITY = 100.0  # SmolLM2-135M in 4 bits has 17 on it; a guessing model has its vocabulary's size
LONG_TOKENS = 300
LONG_PROMPTS = tuple(next(one for one in PROMPTS if one.language == language) for language in ("en", "zh"))
MAX_BROKEN = 0.02  # of the characters; the last one of a text may be cut
MAX_WRONG_SCRIPT = 0.3  # of the letters of an English text
MAX_REPETITION = 0.6  # of the 4-grams
ANSWER_LIMIT = 600.0  # seconds
GENERATED = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"
REQUESTS = "voltserve_requests_total"


@dataclass
class Conversation:
    """Asks one service's model, and counts the tokens that its answers report."""

    service: Service
    model: str
    tokens: int = field(default=0)

    def complete(self, prompt: str, max_tokens: int, **more: object) -> dict[str, Any]:
        """One greedy completion's choice.

        Raises:
            ServiceFailedError: no answer, or none of the form that OpenAI's has.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        key = os.environ.get(API_KEY, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            answer = httpx.post(f"{self.service.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_LIMIT)
            value = answer.json()
            choice: dict[str, Any] = value["choices"][0]
            self.tokens += int(value["usage"]["completion_tokens"])
        except httpx.HTTPError as error:
            raise ServiceFailedError(f"a completion failed: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            text = f"{answer.status_code}: {answer.text[:300]}"
            raise ServiceFailedError(f"expected a completion, got {text}") from error
        return choice

    def text(self, prompt: str, max_tokens: int) -> str:
        """The greedy continuation of a prompt."""
        return str(self.complete(prompt, max_tokens)["text"])


def ask_in_two_languages(conversation: Conversation) -> Result:
    """A fact in English, a sentence in Chinese, and how well the model predicts plain English."""
    english = conversation.text("The capital of France is", 16)
    chinese = conversation.text("北京是中国的", 16)
    choice = conversation.complete(PLAIN_ENGLISH, 1, echo=True, logprobs=0)
    return judge_answers(english, chinese, perplexity_of(choice))


def perplexity_of(choice: dict[str, Any]) -> float:
    """Of an echoed prompt: exp of the mean of its tokens' negative log-probabilities, the first and the new one apart.

    Raises:
        ServiceFailedError: the choice does not hold them.
    """
    found = choice.get("logprobs")
    scores = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(scores, list) or len(scores) < 3 or not all(isinstance(one, int | float) for one in scores[1:]):
        raise ServiceFailedError(f"expected echoed log-probabilities, got {str(found)[:100]}")
    return math.exp(-sum(scores[1:-1]) / (len(scores) - 2))


def judge_answers(english: str, chinese: str, perplexity: float) -> Result:
    """Whether the answers are a working model's."""
    verdicts: list[Verdict] = []
    details = [f"The capital of France is{english}", f"北京是中国的{chinese}"]
    for text in (english, chinese):
        if not text.strip() or "\N{REPLACEMENT CHARACTER}" in text.rstrip("\N{REPLACEMENT CHARACTER}"):
            verdicts.append("error")
            details.append(f"expected text, got {text!r}")
    if not perplexity < MAX_PERPLEXITY:  # NaN, too
        verdicts.append("error")
        details.append(
            f"perplexity of plain English: expected less than {MAX_PERPLEXITY:g}, got {perplexity:.0f}: the weights "
            "are read or computed wrongly, or this model knows no English"
        )
    if "Paris" not in english:
        verdicts.append("warning")
        details.append("expected Paris as the capital of France")
    return Result(worst(verdicts), f"perplexity of plain English {perplexity:.1f}", tuple(details))


def write_at_length(conversation: Conversation, on_progress: OnProgress) -> Result:
    """A text of 300 tokens in each language: errors of 4-bit weights add up there."""
    return judge_long(write_long(conversation.text, LONG_TOKENS, "long outputs", LONG_PROMPTS, on_progress))


def judge_long(found: LongOutputResult) -> Result:
    """Whether long texts are a working model's. Loops, and another script in Chinese, are only warnings."""
    verdicts: list[Verdict] = []
    details = []
    for output in found.outputs:
        details.append(f"{output.prompt}{output.text}")
        problems: list[tuple[Verdict, str]] = []
        if not output.text.strip():
            problems.append(("error", "no text"))
        if output.broken > MAX_BROKEN:
            problems.append(("error", f"{output.broken:.0%} of its characters are broken"))
        if output.wrong_script > MAX_WRONG_SCRIPT:
            verdict: Verdict = "error" if output.language == "en" else "warning"
            problems.append((verdict, f"{output.wrong_script:.0%} of its letters are of another script"))
        if output.loop:
            problems.append(("warning", "it ends in a loop"))
        elif output.repetition > MAX_REPETITION:
            problems.append(("warning", f"{output.repetition:.0%} of its 4-grams occurred before"))
        verdicts += [verdict for verdict, _ in problems]
        details += [f"{output.language}: {verdict}: {text}" for verdict, text in problems]
    summary = f"{len(found.outputs)} texts of {LONG_TOKENS} tokens: {found.repetition:.0%} of 4-grams repeated"
    return Result(worst(verdicts), f"{summary}, {found.loop:.0%} end in a loop", tuple(details))


def judge_metrics(before: Metrics, after: Metrics, tokens: int) -> Result:
    """Whether the engine counted the same tokens as its answers report, and is idle."""
    missing = [name for name in (GENERATED, RUNNING, REQUESTS) if name not in after]
    if missing:
        return Result("error", f"/metrics lacks {', '.join(missing)}")
    counted = after.sum(GENERATED) - before.sum(GENERATED)
    problems = []
    if counted != tokens:
        problems.append(f"{GENERATED}: expected {tokens}, as the answers' usage says, got {counted:g}")
    if running := after.sum(RUNNING):
        problems.append(f"{RUNNING}: expected 0 after the last answer, got {running:g}")
    summary = f"{counted:g} tokens generated, {after.sum(REQUESTS):g} requests counted"
    return Result("error" if problems else "ok", summary, tuple(problems))
