import math

import pytest

from quant.evaluate.long_output import Prompt, write_long
from server.run.child import ServiceFailedError
from server.scrape import Metrics
from server.smoke.checks import LONG_PROMPTS, judge_answers, judge_long, judge_metrics, perplexity_of
from server.smoke.steps import Result, Verdict, take, worst

GOOD = " Paris. It is a large city on the river Seine."
CHINESE = "首都，也是一座有三千年历史的城市。"


def test_a_working_models_answers_are_ok() -> None:
    assert judge_answers(GOOD, CHINESE, 11.0).verdict == "ok"


@pytest.mark.parametrize(
    ("english", "chinese", "perplexity", "verdict", "told"),
    [
        (" Lyon.", CHINESE, 11.0, "warning", "expected Paris"),
        (GOOD, "  ", 11.0, "error", "expected text, got '  '"),
        (GOOD, "首\ufffd都", 11.0, "error", "expected text"),
        (GOOD, CHINESE + "\ufffd", 11.0, "ok", ""),
        (GOOD, CHINESE, 4000.0, "error", "expected less than 100, got 4000"),
        (GOOD, CHINESE, math.nan, "error", "got nan"),
    ],
)
def test_what_a_broken_model_answers_is_told(
    english: str, chinese: str, perplexity: float, verdict: Verdict, told: str
) -> None:
    got = judge_answers(english, chinese, perplexity)
    assert got.verdict == verdict
    assert told in "\n".join(got.details)


def test_perplexity_leaves_out_the_first_token_and_the_new_one() -> None:
    assert perplexity_of({"logprobs": {"token_logprobs": [None, -1.0, -3.0, -50.0]}}) == pytest.approx(math.exp(2))


@pytest.mark.parametrize("choice", [{}, {"logprobs": None}, {"logprobs": {"token_logprobs": [None, None, -1.0]}}])
def test_an_answer_without_log_probabilities_is_an_error(choice: dict[str, object]) -> None:
    with pytest.raises(ServiceFailedError, match="expected echoed log-probabilities"):
        perplexity_of(choice)


STORY = "the fox said that one should cross a river only when nobody else is looking at it or wants to eat you"
TALE = "孩子们跑到湖边，看见一只白色的小鸟停在树上，它轻轻唱着歌，大家都安静下来听。"
SALAD = "слово 語 κόσμος wort слово дом 世界 мир небо ночь λόγος день"


def judged(english: str, chinese: str) -> Result:
    texts = {LONG_PROMPTS[0].text: english, LONG_PROMPTS[1].text: chinese}
    return judge_long(write_long(lambda prompt, tokens: texts[prompt], 300, "x", LONG_PROMPTS))


def test_there_is_a_prompt_in_each_language() -> None:
    assert [one.language for one in LONG_PROMPTS] == ["en", "zh"]
    assert all(isinstance(one, Prompt) for one in LONG_PROMPTS)


@pytest.mark.parametrize(
    ("english", "chinese", "verdict", "told"),
    [
        (STORY, TALE, "ok", ""),
        (SALAD, TALE, "error", "en: error: "),
        (STORY, STORY, "warning", "zh: warning: 100% of its letters are of another script"),
        ("ha " * 100, TALE, "warning", "en: warning: it ends in a loop"),
        (STORY, TALE[:9] * 9, "warning", "zh: warning: 88% of its 4-grams occurred before"),
        ("", TALE, "error", "en: error: no text"),
        (STORY, "\ufffd" * 9 + TALE, "error", "of its characters are broken"),
    ],
)
def test_long_texts_are_judged(english: str, chinese: str, verdict: Verdict, told: str) -> None:
    got = judged(english, chinese)
    assert got.verdict == verdict
    assert told in "\n".join(got.details)


BEFORE = {"vllm:generation_tokens_total": 10.0, "vllm:num_requests_running": 0.0, "voltserve_requests_total": 1.0}


def metrics(values: dict[str, float]) -> Metrics:
    return Metrics({name: (value,) for name, value in values.items()})


@pytest.mark.parametrize(
    ("changes", "verdict", "told"),
    [
        ({"vllm:generation_tokens_total": 110.0}, "ok", ""),
        ({"vllm:generation_tokens_total": 109.0}, "error", "expected 100, as the answers' usage says, got 99"),
        ({"vllm:generation_tokens_total": 110.0, "vllm:num_requests_running": 1.0}, "error", "expected 0 after"),
    ],
)
def test_metrics_must_agree_with_the_answers(changes: dict[str, float], verdict: Verdict, told: str) -> None:
    got = judge_metrics(metrics(BEFORE), metrics({**BEFORE, **changes}), 100)
    assert got.verdict == verdict
    assert told in "\n".join(got.details)


def test_metrics_that_are_not_there_are_an_error() -> None:
    assert judge_metrics(metrics({}), metrics({}), 0).verdict == "error"


def test_a_users_error_is_the_steps_and_a_bug_is_raised() -> None:
    def fail() -> Result:
        raise ServiceFailedError("gone")

    assert take("x", "m", fail).result == Result("error", "gone")
    with pytest.raises(ZeroDivisionError):
        take("x", "m", lambda: Result("ok", str(1 // 0)))


def test_the_worst_verdict_counts() -> None:
    assert worst(["ok", "skipped", "warning"]) == "warning"
    assert worst([]) == "ok"
