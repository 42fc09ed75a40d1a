import math
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from server.decisions import Decision, costly
from server.supervisor.probe import NO_NUMBER, EngineNotWorkingError, check_finite, oddities, prove

WORDS = [" Paris", ".", " The", " city"]


def logprobs(tokens: list[str], values: list[Any]) -> dict[str, Any]:
    return {"tokens": tokens, "token_logprobs": values}


@pytest.mark.parametrize(
    ("tokens", "values"),
    [
        (WORDS, [-0.1, -0.5, -1.0, -2.0]),
        (WORDS, [0.0, 1e-6, -0.0, -30.0]),
        ([" a"] * 12, [-10.8] * 12),  # random weights: one token again and again, none of them likely
        ([" a"] * 12, [-0.01] * 11 + [-3.0]),
        ([" a"], [-0.01]),
    ],
)
def test_a_completion_that_may_be_sound_is_not_odd(tokens: list[str], values: list[float]) -> None:
    check_finite(logprobs(tokens, values))
    assert oddities(logprobs(tokens, values)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -9999.0, 0.5, None, "0"])
async def test_a_likeliest_token_without_a_sound_probability_is_no_proof(value: Any) -> None:
    with pytest.raises(EngineNotWorkingError, match=r"not finite: .*' The', has the log-prob") as raised:
        check_finite(logprobs(WORDS, [-0.1, -0.5, value, -2.0]))
    assert str(value) in str(raised.value)
    if not isinstance(value, float) or math.isfinite(value):  # JSON has no others
        answer = {"choices": [{"text": "x", "logprobs": logprobs(WORDS, [-0.1, -0.5, value, -2.0])}]}
        with pytest.raises(EngineNotWorkingError, match="not finite"):
            await prove(engine({COMPLETIONS: [(200, answer)]}), "m")


@pytest.mark.parametrize(
    "refusal",
    [
        (400, {"error": {"message": "Out of range float values are not JSON compliant"}}),
        (500, {"error": {"message": "no token is possible: …", "code": "no_possible_token"}}),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/embeddings"])
async def test_an_engine_that_computes_no_numbers_is_no_proof(route: str, refusal: tuple[int, Any]) -> None:
    with pytest.raises(EngineNotWorkingError, match=f"not finite: {route} had NaN"):
        await prove(engine({route: [refusal, refusal]}), "m")


def test_json_refuses_nan_in_the_words_that_the_probe_knows() -> None:
    with pytest.raises(ValueError, match=NO_NUMBER[0]):
        JSONResponse({"x": math.nan})


def test_one_token_with_certainty_is_odd() -> None:
    assert oddities(logprobs(["!"] * 12, [-0.001] * 12)) == [
        "the first completion repeats '!' 12 times, each time with near certainty"
    ]


def test_no_log_probabilities_are_odd() -> None:
    assert "no log-probabilities" in oddities({})[0]


def engine(answers: dict[str, list[tuple[int, Any]]]) -> httpx.AsyncClient:
    """A client of an engine that gives each route's answers in turn, and 404 elsewhere."""

    def answer(request: httpx.Request) -> httpx.Response:
        status, body = answers[request.url.path].pop(0) if request.url.path in answers else (404, {})
        return httpx.Response(status, json=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine")


COMPLETIONS = "/v1/completions"
SOUND = {"choices": [{"text": "x", "logprobs": logprobs(WORDS, [-0.1] * 4)}]}


async def test_a_sound_completion_proves_without_a_warning() -> None:
    proof = await prove(engine({COMPLETIONS: [(200, SOUND)]}), "m")
    assert (proof.route, proof.warnings) == (COMPLETIONS, ())


async def test_a_model_that_gives_no_such_completion_is_proved_by_a_plain_one_and_that_is_said() -> None:
    refusal = (400, {"error": {"message": "context of 8 tokens"}})
    proof = await prove(engine({COMPLETIONS: [refusal, (200, {"choices": [{"text": "x"}]})]}), "m")
    assert proof.route == COMPLETIONS
    assert "could not be examined" in proof.warnings[0]
    assert "context of 8 tokens" in proof.warnings[0]


async def test_what_is_wrong_in_a_plain_completion_too_is_no_proof() -> None:
    with pytest.raises(EngineNotWorkingError, match="answered 400"):
        await prove(engine({COMPLETIONS: [(400, {}), (400, {})]}), "m")
    with pytest.raises(EngineNotWorkingError, match="answered 500"):
        await prove(engine({COMPLETIONS: [(500, {})]}), "m")
    empty: tuple[Any, ...] = ({}, {"choices": []}, [])
    for nothing in empty:
        with pytest.raises(EngineNotWorkingError, match="with no completion"):
            await prove(engine({COMPLETIONS: [(200, nothing)]}), "m")
    with pytest.raises(EngineNotWorkingError, match="serves none of /v1/completions, /v1/embeddings"):
        await prove(engine({}), "m")


def test_weights_that_do_not_stay_in_4_bits_are_told() -> None:
    kernels = Decision("NVFP4 linear layers", "kernels", "there is code")
    dense = Decision("NVFP4 experts", "dense", "voltserve_kernels has no code for cuda")
    assert costly([kernels, dense]) == ["NVFP4 experts do not stay in 4 bits: voltserve_kernels has no code for cuda"]
