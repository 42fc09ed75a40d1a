"""Faults while clients wait: each client gets its whole answer or an error, and the service recovers.

Other faults have their own tests:

    at a start (crash at load, never listening, slow load, taken port)    tests/server/run/test_serve.py and
                                                                          tests/server/supervisor/test_supervisor.py
    malformed requests                                                    test_malformed.py
    the real engine's                                                     tests/e2e
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import PreflightError
from server.run.lifetime import runtime_folder
from tests.server.conftest import LIMIT, ROOT, Served, free_port, make_model, serving, wait_for

TOKENS = 60
SLOW = {"tokens": TOKENS, "delay": 0.1}
FLAGS = ("--heartbeat-timeout", "0.5", "--step-timeout", "1", "--hang-timeout", "0.5", "--stop-timeout", "0.5")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server that survives every fault below."""
    with serving(make_model(tmp_path_factory.mktemp("faults") / "m"), *FLAGS) as server:
        server.wait_for_state("ready")
        yield server


async def outcome(url: str, model: Path, *, stream: bool, fake: dict[str, Any]) -> str:
    """How one client's request ended: finished, refused, error event, or broken. Anything else is a wrong 200."""
    body = {"model": str(model), "prompt": "Hi", "stream": stream, "fake": fake}
    try:
        async with httpx.AsyncClient(timeout=LIMIT) as client:
            reply = await client.post(f"{url}/v1/completions", json=body)
    except httpx.RemoteProtocolError:
        return "broken"
    if reply.status_code in {502, 503}:
        assert reply.json()["error"]["message"]
        return "refused"
    assert reply.status_code == 200
    last = f"字{fake['tokens'] - 1} "
    if not stream:
        assert last in reply.json()["choices"][0]["text"]
        return "finished"
    events = [line.removeprefix("data: ") for line in reply.text.strip().split("\n\n")]
    if "error" in events[-1]:
        assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
        return "error event"
    assert events[-1] == "[DONE]"
    assert last in reply.text
    return "finished"


def kill(served: Served) -> None:
    os.kill(served.engine_pids()[0], signal.SIGKILL)


def stop(served: Served) -> None:
    os.kill(served.engine_pids()[0], signal.SIGSTOP)


def hang(served: Served) -> None:
    (served.model / "hung").touch()


def die(served: Served) -> None:
    (served.model / "dead").touch()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (kill, "SIGKILL"),
        (stop, "hung: no heartbeat"),
        (hang, "hung: its core has ended no step"),
        (die, "core process died"),
    ],
)
async def test_clients_in_flight_get_an_error_and_the_service_comes_back(
    served: Served, fault: Callable[[Served], None], reason: str
) -> None:
    restarts = served.health()[1]["restarts"]
    kinds = [True] * 5 + [False] * 3
    clients = [asyncio.create_task(outcome(served.url, served.model, stream=kind, fake=SLOW)) for kind in kinds]
    await asyncio.to_thread(wait_for, lambda: served.stats()["running"] == len(kinds), "the requests run")
    fault(served)
    failed = await asyncio.to_thread(served.wait_for_state, "failed", "starting")
    for file in ("hung", "dead"):
        (served.model / file).unlink(missing_ok=True)
    assert reason in str(failed["last_exit"])
    outcomes = await asyncio.gather(*clients)
    assert set(outcomes[:5]) <= {"error event", "broken"}, outcomes
    assert set(outcomes[5:]) == {"refused"}, outcomes
    assert (await asyncio.to_thread(served.wait_for_state, "ready"))["restarts"] == restarts + 1
    assert await outcome(served.url, served.model, stream=True, fake={"tokens": 3}) == "finished"
    metrics = httpx.get(f"{served.url}/metrics").text  # noqa: ASYNC210
    for gauge in ("voltserve_requests_in_flight", "voltserve_requests_queued", 'vllm:num_requests_running{engine="0"}'):
        assert f"{gauge} 0" in metrics


async def test_sigterm_under_32_streams_lets_every_one_finish(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m"), "--max-in-flight", "32") as served:
        served.wait_for_state("ready")
        fake = {"tokens": 30, "delay": 0.1}
        clients = [asyncio.create_task(outcome(served.url, served.model, stream=True, fake=fake)) for _ in range(32)]
        await asyncio.to_thread(wait_for, lambda: served.stats()["running"] == 32, "32 streams run")
        queued = asyncio.create_task(outcome(served.url, served.model, stream=True, fake=fake))
        await asyncio.to_thread(
            wait_for, lambda: "voltserve_requests_queued 1.0" in httpx.get(f"{served.url}/metrics").text, "one waits"
        )
        served.process.send_signal(signal.SIGTERM)
        assert set(await asyncio.gather(*clients)) == {"finished"}
        assert await queued == "refused"
        assert await asyncio.to_thread(served.wait_for_exit) == 0


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    port = free_port()
    command = [sys.executable, "-m", "tests.fakes.serve", "--model", str(model), "--port", str(port)]
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        process = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=full)
    served = Served(process, f"http://127.0.0.1:{port}", tmp_path / "none", model)
    (tmp_path / "none").touch()
    try:
        wait_for(lambda: _answers(served), "an answer")
        served.wait_for_state("ready")
        assert served.post().status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert served.wait_for_exit() == 0


def _answers(served: Served) -> bool:
    assert served.process.poll() is None
    try:
        return served.health()[0] > 0
    except httpx.TransportError:
        return False


def test_no_room_for_the_runtime_folder_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> str:
        raise OSError(28, "No space left on device", f"/tmp/{prefix}")  # noqa: S108

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(PreflightError, match="No space left on device; set TMPDIR"), runtime_folder():
        pytest.fail("it goes on")
