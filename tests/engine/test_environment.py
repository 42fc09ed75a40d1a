"""Names that the gateway spells for itself, since it never imports the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import environment

SERVER = Path(__file__).parents[2] / "server"


@pytest.mark.parametrize("name", ["FORCE_VOLTA", "PROGRESS_SOCKET", "SUPERVISOR", "NO_DYNAMO"])
def test_the_gateway_sets_the_variable_that_the_engine_reads(name: str) -> None:
    spelled = f'"{getattr(environment, name)}"'
    assert any(spelled in path.read_text() for path in SERVER.rglob("*.py"))
