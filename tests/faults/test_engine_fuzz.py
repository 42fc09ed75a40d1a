"""Requests made of the document at the real engine. docs/results has a longer run (engine_fuzz.py)."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis

from tests.e2e.conftest import serving as serving_the_real_engine
from tests.faults.engine_fuzz import capped, fuzz, measure, narrowed, report
from tests.faults.openapi_fuzz import operations
from tests.server.conftest import make_model, serving

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({}, {"max_tokens": 6}),
        ({"max_tokens": 10**30, "n": 9}, {"max_tokens": 6, "n": 2}),
        ({"max_tokens": None, "max_completion_tokens": None}, {"max_tokens": 6, "max_completion_tokens": None}),
        ({"max_tokens": "900", "n": "x"}, {"max_tokens": 6, "n": "x"}),
        ({"max_tokens": -1, "n": [9]}, {"max_tokens": -1, "n": [9]}),
        ([], []),
        ("x", "x"),
    ],
)
def test_what_would_take_minutes_is_capped_and_all_else_is_sent_as_it_was_made(body: Any, sent: Any) -> None:
    assert capped(CHAT, body) == sent
    assert capped("/v1/embeddings", body) == body


def test_a_run_counts_what_it_sent_and_finds_an_engine_that_takes_anything(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m")) as served:
        served.wait_for_state("ready")
        document = httpx.get(f"{served.url}/openapi.json").json()
        assert len(list(operations(schemathesis.openapi.from_dict(narrowed(document))))) > 10
        outcome = fuzz(served.url, time.time() + 300, seed=1, turns=1, at_once=3)
    told = report(outcome)
    assert told["failures"]["AcceptedNegativeData"] > 0
    assert told["examples"]["AcceptedNegativeData"]
    assert told["answered"]["GET /health"]["200"] > 0
    assert sum(told["sent"].values()) == outcome.answered.total()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_requests_made_of_the_document_leave_the_real_engine_as_it_was(tmp_path: Path) -> None:
    with serving_the_real_engine(tmp_path / "log") as service:
        told = measure(service, minutes=10, seed=7)
    assert told["answers_of_500_and_above"] == 0, told["examples"]
    assert told["not_as_before"] == []
    assert told["chats_completed"] >= 50
    assert not [kind for kind in told["failures"] if kind != "AcceptedNegativeData"], told["examples"]
