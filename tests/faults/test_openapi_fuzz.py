"""Requests that schemathesis makes of the gateway's document. docs/results has a longer run (openapi_fuzz.py)."""

from pathlib import Path

import pytest
from schemathesis.core.failures import FailureGroup

from tests.faults.openapi_fuzz import fuzz
from tests.server.conftest import make_model, serving


def test_requests_made_of_the_document_are_answered_as_it_says(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m", judge=True), "--max-body-bytes", "4000") as served:
        served.wait_for_state("ready")
        outcome = fuzz(served.url, examples=15, seed=1)
        assert min(outcome.sent["positive"], outcome.sent["negative"]) >= 50
        assert {200, 400, 404} <= set(outcome.answered)
        assert served.health()[0] == 200


def test_an_engine_that_takes_anything_is_found_out(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m")) as served:
        served.wait_for_state("ready")
        with pytest.raises(FailureGroup):
            fuzz(served.url, examples=15, seed=1)
