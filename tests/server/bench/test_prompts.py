from pathlib import Path

import httpx
import pytest

from server.bench.prompts import BenchError, Target, draw, find_target, token_pool
from tests.fakes.engine import Start
from tests.server.bench.conftest import MODEL, engine


def test_prompts_are_exactly_as_long_as_asked_and_share_no_prefix() -> None:
    pool = tuple(range(100, 300))
    prompts = [draw(pool, 64, 0, "measured", "×8", number) for number in range(500)]
    assert {len(prompt) for prompt in prompts} == {64}
    assert set().union(*prompts) <= set(pool)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 500
    assert draw(pool, 64, 0, "measured", "×8", 3) == prompts[3]


def test_the_pool_is_what_the_server_makes_of_english(target: Target) -> None:
    pool = token_pool(target)
    assert len(pool) > 50
    assert list(pool) == sorted(set(pool))


def test_the_first_model_is_found_and_a_missing_one_named(target: Target) -> None:
    assert find_target(f"{target.url}/v1/", "").model == MODEL
    with pytest.raises(BenchError, match="expected the model other, got fake"):
        find_target(target.url, "", "other")


def test_a_server_that_does_not_tell_tokens_is_refused_with_the_reason(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = httpx.Response(200, json={"choices": [{"text": "x"}]})
    monkeypatch.setattr(httpx, "request", lambda *_, **__: answer)
    with pytest.raises(BenchError, match="expected prompt_token_ids in the answer to return_token_ids, got None"):
        token_pool(target)


def test_a_server_that_answers_errors_is_quoted(tmp_path: Path) -> None:
    with (
        engine(tmp_path, Start(refusal=(500, "no kernel image"))) as (target, _),
        pytest.raises(BenchError, match=r"expected success, got 500.*no kernel image"),
    ):
        token_pool(target)


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "expected an answer"), ("http://me:secret@h", "expected no user name"), ("x", "expected")],
)
def test_an_unusable_url_is_one_message(url: str, message: str) -> None:
    with pytest.raises(BenchError, match=message) as caught:
        find_target(url, "")
    assert "secret" not in str(caught.value)


def test_the_key_is_in_no_repr() -> None:
    assert "vs-secret" not in repr(Target("http://x", "m", "vs-secret"))
