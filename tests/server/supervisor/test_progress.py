import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import environment
from engine import progress as sender
from server.decisions import Decision
from server.supervisor.progress import Event, ProgressTracker, parse_datagram, receive_progress
from server.supervisor.states import Progress


def event(**fields: Any) -> Event:
    return parse_datagram(json.dumps({"rank": 0, **fields}).encode())


def weights(rank: int, done: int) -> Event:
    return event(event="progress", phase="weights", done=done, total=100, unit="bytes", rank=rank)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"event": "other"},
        {"event": "phase", "phase": "sleeping"},
        {"event": "phase", "phase": "weights", "rank": -1},
        {"event": "phase", "phase": "weights", "rank": "zero"},
        {"event": "progress", "phase": "weights", "done": 2, "total": 1, "unit": "bytes"},
        {"event": "progress", "phase": "weights", "done": -1, "total": 1, "unit": "bytes"},
        {"event": "progress", "phase": "weights", "done": 1, "total": 1, "unit": "shards"},
        {"event": "decision", "what": "x" * 1001, "choice": "y", "reason": "z"},
        {"event": "decision", "what": "x" * 5000, "choice": "y", "reason": "z"},
    ],
)
def test_a_wrong_datagram_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        event(**fields)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_datagram(data)


def test_the_rank_furthest_behind_is_shown() -> None:
    tracker = ProgressTracker()
    assert tracker.progress is None
    tracker.take(weights(0, 50))
    tracker.take(weights(1, 20))
    assert tracker.progress == Progress("weights", 20, 100, "bytes")
    tracker.take(event(event="phase", phase="warmup", rank=1))
    assert tracker.progress == Progress("weights", 50, 100, "bytes")
    tracker.take(event(event="phase", phase="warmup", rank=0))
    assert tracker.progress == Progress("warmup")


def test_a_choice_that_every_rank_made_is_one_decision() -> None:
    tracker = ProgressTracker()
    for rank in range(2):
        tracker.take(event(event="decision", what="attention", choice="A", reason="r", rank=rank))
    assert tracker.decisions == (Decision("attention", "A", "r"),)


def test_decisions_cannot_fill_the_memory() -> None:
    tracker = ProgressTracker()
    for index in range(1000):
        tracker.take(event(event="decision", what=f"w{index}", choice="A", reason="r"))
    assert len(tracker.decisions) == 256


async def test_what_the_engine_sends_arrives_and_rubbish_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.sock"
    monkeypatch.setenv(environment.PROGRESS_SOCKET, str(path))
    tracker, problems = ProgressTracker(), asyncio.Queue[str]()
    transport = await receive_progress(path, tracker.take, problems.put_nowait)
    try:
        sender.phase("weights")
        told = sender.WeightsProgress()
        told.expect(10)
        told.advance(4, "a.safetensors")
        sender.decision("kernel", "reference", f"测试 {path}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"{", str(path))
            sock.sendto(b"x" * 5000, str(path))
        assert "JSON" in await problems.get()
        assert "4096 bytes" in await problems.get()
    finally:
        transport.close()
    assert tracker.progress == Progress("weights", 4, 10, "bytes")
    assert tracker.decisions == (Decision("kernel", "reference", f"测试 {path}"),)
