import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.client import Client, Outcome, read_answer
from server.bench.prompts import BenchError, Target
from tests.fakes.engine import Start
from tests.server.bench.conftest import engine


def event(**value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str = "x") -> bytes:
    return event(choices=[{"index": 0, "text": text}])


USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def read(*pieces: tuple[float, bytes], status: int = 200, problem: str = "") -> Outcome:
    return read_answer(status, list(pieces), problem, 0.0, 0.25, (5, 3))


def test_each_piece_of_text_has_the_time_at_which_it_came_and_tokens_are_the_servers_count() -> None:
    got = read((1.0, token()), (1.5, token() + token("")), (3.0, USAGE + DONE))
    assert got == Outcome(0.0, 0.25, (1.0, 1.5, 1.5), 1.5, 5, 3)


@given(st.data())
def test_events_cut_anywhere_are_the_same_events_at_the_time_of_their_last_byte(data: st.DataObject) -> None:
    whole = token("a") + b": keep-alive\n\n" + token("字") + token("c") + USAGE + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    got = read(*((float(number), part) for number, part in enumerate(parts)))
    assert got.error == ""
    ends = [whole.index(text) + len(text) for text in (token("a"), token("字"), token("c"))]
    expected = tuple(float(sum(cut < end for cut in cuts)) for end in ends)
    assert got.events == expected


@pytest.mark.parametrize(
    ("pieces", "status", "problem", "error"),
    [
        ([b'{"error": {"message": "no room", "code": 503}}'], 503, "", "503: no room"),
        ([b"<html>"], 502, "", "502: not JSON: b'<html>'"),
        ([token()], 200, "the connection broke: reset", "the connection broke: reset"),
        ([token() + USAGE], 200, "", "the stream ended early"),
        ([token() + b'data: {"error": {"message": "engine died"}}\n\n' + DONE], 200, "", "engine died"),
        ([USAGE + DONE], 200, "", "no token came"),
        ([token() + DONE], 200, "", "expected 5 + 3 tokens, got 0 + 0"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces: list[bytes], status: int, problem: str, error: str) -> None:
    assert read(*((1.0, piece) for piece in pieces), status=status, problem=problem).error == error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_a_url_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="expected a URL"):
        Client(Target(url, "m"), lambda: 0.0)


async def test_a_server_that_is_not_there_is_an_error_of_the_request() -> None:
    got = await Client(Target("http://127.0.0.1:9", "m"), lambda: 0.0).complete([1], 1, 0.0, 5.0)
    assert "cannot connect" in got.error


async def test_a_request_beyond_its_limit_is_given_up(tmp_path: Path) -> None:
    with engine(tmp_path, Start(answer={"first_delay": 2.0})) as (target, _):
        slow = await Client(target, lambda: 0.0).complete([1, 2], 5, 0.0, 0.1)
    assert slow.error == "no complete answer within 0.1 s"
