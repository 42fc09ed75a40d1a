"""Names that the gateway spells for itself, since it never imports the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import environment
from server import environment as gateway

SERVER = Path(__file__).parents[2] / "server"


@pytest.mark.parametrize("name", ["FORCE_VOLTA", "PROGRESS_SOCKET", "SUPERVISOR"])
def test_the_gateway_sets_the_variable_that_the_engine_reads(name: str) -> None:
    assert getattr(gateway, name) == getattr(environment, name)


def test_the_gateway_knows_the_variable_that_turns_dynamo_off() -> None:
    spelled = f'"{environment.NO_DYNAMO}"'
    assert any(spelled in path.read_text() for path in SERVER.rglob("*.py"))
