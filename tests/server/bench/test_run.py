from collections.abc import Sequence
from pathlib import Path

import pytest

from quant.progress import Progress
from server.bench.client import Outcome
from server.bench.load import Closed, Open, arrivals
from server.bench.measures import summarize
from server.bench.prompts import BenchError, Target
from server.bench.run import BenchSettings, LevelResult, run_bench
from server.errors import ConfigError
from tests.fakes.engine import Start
from tests.server.bench.conftest import engine


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    return max(sum(one.sent <= other.sent < one.ended for one in outcomes) for other in outcomes)


def test_a_closed_level_keeps_its_users_busy_and_asks_for_exact_tokens(tmp_path: Path) -> None:
    with engine(tmp_path, Start(answer={"delay": 0.01})) as (target, fake):
        (got,) = run_bench(target, BenchSettings(input_len=12, output_len=5, levels=(Closed(3),), requests=10))
        tokens = fake.stats["tokens"]
    assert [one.error for one in got.outcomes] == [""] * 10
    assert {(one.prompt_tokens, one.output_tokens, len(one.events)) for one in got.outcomes} == {(12, 5, 5)}
    assert most_at_once(got.outcomes) == 3
    assert (got.warmup.requests, got.warmup.failed) == (3, 0)
    # The question for tokens has 3, each warm-up as many as an answer; none of them is among the ten measured.
    assert tokens == 3 + 3 * 5 + 10 * 5


def test_scripted_delays_are_what_is_measured(tmp_path: Path) -> None:
    with engine(tmp_path, Start(answer={"first_delay": 0.2, "delay": 0.03})) as (target, _):
        (result,) = run_bench(target, BenchSettings(4, 9, (Closed(2),), requests=4))
    got = summarize(result)
    assert got.ttft is not None
    assert got.tpot is not None
    assert got.e2e is not None
    # Never less than scripted; more only by what a busy machine adds.
    assert 0.23 <= got.ttft.p50 < 0.23 + 0.5
    assert 0.03 <= got.tpot.p50 < 0.03 + 0.1
    assert got.e2e.p50 >= 0.23 + 8 * 0.03
    assert got.tokens_per_s == pytest.approx(36 / result.seconds)


def test_an_open_level_sends_when_due_whether_or_not_answers_come(tmp_path: Path) -> None:
    level = Open(50)
    with engine(tmp_path, Start(answer={"first_delay": 0.5})) as (target, _):
        (got,) = run_bench(target, BenchSettings(4, 2, (level,), requests=20, seed=3))
    assert [one.due for one in got.outcomes] == arrivals(level, 20, 3)
    assert all(one.sent >= one.due - 0.002 for one in got.outcomes)  # the loop's timer counts whole milliseconds
    # All were due within the first answer's delay: a closed loop of any size below 20 could not have sent them.
    assert got.outcomes[-1].due < 0.5 + got.outcomes[0].sent
    assert most_at_once(got.outcomes) > 10


def test_a_level_needs_a_request_for_each_of_its_users() -> None:
    with pytest.raises(ConfigError, match="--requests 6: expected at least 8, one for each user of ×8"):
        BenchSettings(4, 2, (Closed(1), Closed(8)), requests=6)


def test_failing_requests_are_counted_and_the_level_goes_on(tmp_path: Path) -> None:
    with engine(tmp_path, Start(fail_every=4)) as (target, _):
        (result,) = run_bench(target, BenchSettings(4, 2, (Closed(1),), requests=12))
    got = summarize(result)
    assert (got.requests, got.failed, got.errors) == (12, 3, {"500: no room left": 3})
    assert got.output_tokens == 9 * 2


def test_a_server_where_everything_fails_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    with engine(tmp_path, Start(fail_every=1)) as (target, _), pytest.raises(BenchError, match="500: no room left"):
        run_bench(target, BenchSettings(4, 2, (Closed(2),)))


def test_each_level_is_handed_over_as_it_ends_and_progress_counts_up(target: Target) -> None:
    told: list[Progress] = []
    levels: list[LevelResult] = []
    settings = BenchSettings(4, 2, (Closed(1), Closed(2)), requests=3)
    results = run_bench(target, settings, told.append, levels.append)
    assert tuple(levels) == results
    assert [(one.done, one.total) for one in told if one.what == "×2"] == [(1, 3), (2, 3), (3, 3)]
    assert all(one.note.endswith("tok/s") for one in told if one.what == "×2")
