from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from engine.requests import admission
from engine.requests.errors import of_exception

VOCABULARY = 100
MODEL: Any = SimpleNamespace(get_vocab_size=lambda: VOCABULARY, max_logprobs=20)


def check(prompt: Any = None, request_id: str = "r", **params: Any) -> None:
    given = {"type": "token", "prompt_token_ids": [1, 2]} if prompt is None else prompt
    admission.check(given, SamplingParams(**params), request_id, MODEL)


def tokens(*ids: int, **more: Any) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(ids), **more}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", 1e308),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e38),
        ("repetition_penalty", float("nan")),
        ("stop_token_ids", [VOCABULARY]),
        ("stop_token_ids", [3, -1]),
        ("allowed_token_ids", [VOCABULARY]),
        ("allowed_token_ids", [-60000]),
        ("allowed_token_ids", []),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("bad_words", [""]),
        ("bad_words", ["fine", " \n"]),
        ("bad_words", [f"a{number}" for number in range(1025)]),
        ("stop", ["a"] * 257),
        ("stop_token_ids", list(range(1025))),
        ("logprob_token_ids", [VOCABULARY]),
        ("logprob_token_ids", [3, -1]),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", ["\ud800"]),
        ("top_k", 2**70),
        ("max_tokens", 2**70),
        ("extra_args", {"a": 2**70}),
        ("extra_args", {"a": "\ud800"}),
    ],
)
def test_what_the_engine_process_could_not_take_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError) as refusal:
        check(**{field: value})
    assert of_exception(refusal.value, {field: value}).param == field
    assert field in str(refusal.value)


def test_more_choices_than_a_request_may_have_are_refused() -> None:
    check(n=128)
    with pytest.raises(VLLMValidationError, match="n: expected at most 128, got 129"):
        check(n=129)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.0),
        ("temperature", 1e-300),
        ("temperature", 5e-324),
        ("temperature", -0.0),
        ("top_p", 1e-300),
        ("top_p", 5e-324),
        ("min_p", 1e-300),
        ("min_p", 1.0),
        ("top_k", 2**62),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("allowed_token_ids", [0, VOCABULARY - 1]),
        ("stop_token_ids", [0, VOCABULARY - 1]),
        ("logit_bias", {0: 1e300, VOCABULARY - 1: -1e300}),
        ("bad_words", ["word"]),
        ("extra_args", {"a": [1, "b", 2.0]}),
    ],
)
def test_what_is_extreme_and_harmless_is_let_in(field: str, value: Any) -> None:
    check(**{field: value})


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 2**40])
def test_a_prompt_of_tokens_that_the_model_has_not_is_refused(wrong: int) -> None:
    check(tokens(0, VOCABULARY - 1))
    with pytest.raises(VLLMValidationError, match=f"prompt: .* 0 to 99, .* got {wrong}") as refusal:
        check(tokens(5, wrong, 6))
    assert refusal.value.parameter == "prompt"


def test_an_image_s_places_may_hold_any_token() -> None:
    place = SimpleNamespace(offset=1, length=2)
    check(tokens(5, VOCABULARY, VOCABULARY, 6, mm_placeholders={"image": [place]}))
    with pytest.raises(VLLMValidationError, match="got 100"):
        check(tokens(5, VOCABULARY, VOCABULARY, VOCABULARY, mm_placeholders={"image": [place]}))


def test_names_that_a_client_chooses_cross_or_are_refused() -> None:
    check(tokens(1, cache_salt="ü"), request_id="ü")
    for named, given in (("cache_salt", tokens(1, cache_salt="\ud800")), ("request_id", tokens(1))):
        with pytest.raises(VLLMValidationError, match=f"{named} cannot be passed .*: text that is not Unicode"):
            check(given, request_id="\ud800" if named == "request_id" else "r")


def test_pooling_prompts_are_checked_too() -> None:
    with pytest.raises(VLLMValidationError, match="got 100"):
        admission.check(tokens(VOCABULARY), PoolingParams(), "r", MODEL)


def test_a_long_list_of_wrong_tokens_is_not_repeated_whole() -> None:
    with pytest.raises(VLLMValidationError) as refusal:
        check(tokens(*range(VOCABULARY, VOCABULARY + 10_000)))
    assert str(refusal.value).startswith("prompt: expected token ids from 0 to 99")
    assert len(str(refusal.value)) < 200
