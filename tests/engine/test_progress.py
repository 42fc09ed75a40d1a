from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import environment, progress

Receive = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receive]:
    """A listening gateway; calling it gives the datagrams that arrived since the last call."""
    path = tmp_path / "progress.sock"
    monkeypatch.setenv(environment.PROGRESS_SOCKET, str(path))
    progress.decision.cache_clear()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.setblocking(False)

        def drain() -> list[dict[str, Any]]:
            messages = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    messages.append(json.loads(sock.recv(65536)))
            return messages

        yield drain


def test_phases_arrive_in_order_with_the_rank(received: Receive) -> None:
    for name in ("importing", "configuring", "weights", "warmup"):
        progress.phase(name)
    assert received() == [
        {"event": "phase", "phase": name, "rank": 0} for name in ("importing", "configuring", "weights", "warmup")
    ]


def test_a_decision_is_told_once_per_process(received: Receive) -> None:
    for _ in range(3):
        progress.decision("path", "dense", "no kernels")
    progress.decision("path", "kernels", "they came")
    assert [message["choice"] for message in received()] == ["dense", "kernels"]


def test_bytes_are_told_at_most_every_interval_and_always_at_the_end(
    received: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.progress.time.monotonic", lambda: now[0])
    weights = progress.WeightsProgress()
    weights.expect(1000)
    for _ in range(10):  # half an interval and a bit apart: every second one is due
        weights.advance(90, "model-00001.safetensors")
        now[0] += 0.125
    weights.finish()
    told = received()
    assert [message["done"] for message in told] == [90, 270, 450, 630, 810, 1000]
    assert {(m["event"], m["phase"], m["unit"], m["total"]) for m in told} == {("progress", "weights", "bytes", 1000)}
    assert told[0]["file"] == "model-00001.safetensors"


def test_the_last_tensor_is_told_even_within_the_interval(received: Receive) -> None:
    weights = progress.WeightsProgress()
    weights.expect(2)
    weights.advance(1, "a")
    weights.advance(1, "b")
    weights.finish()
    assert [(message["done"], message["file"]) for message in received()] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("reason", ["x" * 100_000, "错" * 100_000, "😀" * 100_000, '"\\' * 50_000, "\udcff" * 5000])
def test_a_long_or_odd_reason_still_fits_a_datagram(received: Receive, reason: str) -> None:
    progress.decision("what", "choice", reason)
    (message,) = received()
    assert message["choice"] == "choice"
    assert len(json.dumps(message, ensure_ascii=False).encode()) <= progress.MAX_BYTES


def test_without_a_listener_nothing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("", str(tmp_path / "nobody.sock"), str(tmp_path / ("long" * 60))):
        monkeypatch.setenv(environment.PROGRESS_SOCKET, path)
        progress.phase("importing")
    monkeypatch.delenv(environment.PROGRESS_SOCKET)
    progress.phase("importing")


def test_a_full_queue_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.sock"
    monkeypatch.setenv(environment.PROGRESS_SOCKET, str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        for _ in range(5000):  # far more than the kernel queues; the test's time limit catches a block
            progress.phase("importing")
        sock.setblocking(False)
        assert json.loads(sock.recv(65536))["phase"] == "importing"
