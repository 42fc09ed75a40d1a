import json
from dataclasses import asdict

import pytest

from server.bench.client import Outcome
from server.bench.load import Open
from server.bench.measures import Distribution, summarize, timeline
from tests.server.bench.conftest import level, outcome


def test_latencies_of_scripted_answers_are_exact() -> None:
    # Four requests, first tokens after 1, 2, 3, 4 s, then 10 more tokens every 0.1, 0.2, 0.3, 0.4 s.
    outcomes = [outcome(sent=10.0, first=10.0 + k, gap=k / 10, tokens=11) for k in (1, 2, 3, 4)]
    got = summarize(level(outcomes, seconds=20.0))
    assert got.ttft is not None
    assert asdict(got.ttft) == pytest.approx(asdict(Distribution(2.5, 2.5, 3.7, 3.85, 3.97, 4.0)))
    assert got.tpot is not None
    assert [got.tpot.p50, got.tpot.largest] == pytest.approx([0.25, 0.4])
    assert got.user_tokens_per_s == pytest.approx(4.0)
    assert got.itl is not None
    assert [got.itl.mean, got.itl.p99] == pytest.approx([0.25, 0.4])
    assert got.e2e is not None
    assert got.e2e.largest == pytest.approx(4 + 10 * 0.4)
    assert (got.output_tokens, got.tokens_per_s, got.requests_per_s) == (44, 44 / 20, 4 / 20)
    assert (got.prompt_tokens, got.failed, got.late) == (32, 0, None)


def test_in_an_open_loop_waiting_counts_from_when_a_request_was_due() -> None:
    got = summarize(level([outcome(sent=3.0, first=4.0, gap=0.5, tokens=3, due=1.0)], 5.0, Open(1.0)))
    assert got.ttft is not None
    assert got.e2e is not None
    assert got.late is not None
    assert (got.ttft.p50, got.e2e.p50, got.late.p50) == (3.0, 4.0, 2.0)


def test_tokens_that_come_several_at_once_count_as_the_server_counts_them() -> None:
    # 9 tokens in 3 pieces: a token takes 8/8 s, although pieces are 4 s apart.
    got = summarize(level([Outcome(0.0, 0.0, (1.0, 5.0, 9.0), 9.0, 8, 9)], 10.0))
    assert got.tpot is not None
    assert got.itl is not None
    assert (got.tpot.p50, got.itl.p50, got.tokens_per_s) == (1.0, 4.0, 0.9)


def test_failed_requests_are_counted_by_their_error_and_are_in_no_other_figure() -> None:
    good = [outcome(0.0, 1.0, 0.1, 5) for _ in range(3)]
    bad = [Outcome(0.0, 0.0, (), 50.0, 0, 0, error) for error in ("503: busy", "reset", "503: busy")]
    got = summarize(level([*good, *bad], 10.0))
    assert (got.requests, got.failed, got.errors) == (6, 3, {"503: busy": 2, "reset": 1})
    assert got.e2e is not None
    assert [got.output_tokens, got.e2e.largest] == pytest.approx([15, 1.4])


def test_without_any_success_there_are_no_latencies_and_the_result_is_still_json() -> None:
    got = summarize(level([Outcome(0.0, 0.0, (), 1.0, 0, 0, "reset")], 1.0))
    assert (got.ttft, got.tpot, got.itl, got.e2e, got.user_tokens_per_s) == (None,) * 5
    assert json.loads(json.dumps(got.as_dict(), allow_nan=False))["tokens_per_s"] == 0


def test_a_timeline_holds_every_token_and_every_second_in_flight() -> None:
    outcomes = [outcome(0.0, 1.0, 0.5, 8), outcome(2.0, 2.5, 0.25, 12), outcome(4.0, 7.0, 0.1, 20)]
    rows = timeline(outcomes, seconds=10.0, bins=20)
    assert [moment for moment, _, _ in rows] == [0.25 + 0.5 * number for number in range(20)]
    assert sum(rate * 0.5 for _, rate, _ in rows) == pytest.approx(40)
    assert sum(busy * 0.5 for _, _, busy in rows) == pytest.approx(sum(one.ended - one.sent for one in outcomes))
    assert rows[0][2] == 1.0
