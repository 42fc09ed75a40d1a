"""A fetch that is killed at any moment goes on from what it has, and ends complete and equal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quant.verify import verify
from server.hub import fetch as fetching
from server.hub.record import STATE
from server.hub.source import parse_source
from tests.fakes.hub import Fault, Hub
from tests.server.conftest import ROOT, wait_for

from .conftest import NAME, contents, model_on, run, without_manifest

SHARD_BYTES = 1 << 20
COMMAND = [sys.executable, "-c", "from server.cli import main; main()", "model", "fetch"]


def start(hub: Hub, directory: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT)}
    command = [*COMMAND, f"hf:{NAME}", str(directory), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def large(hub: Hub) -> int:
    """Makes the model larger, and the hub slower. Returns the bytes of the whole."""
    chance = random.Random(0)  # noqa: S311
    files = model_on(hub)
    files |= {f"part{number}.model": chance.randbytes(SHARD_BYTES) for number in range(4)}
    for name in files:
        hub.always[name] = Fault(slow=0.01)
    return sum(map(len, files.values()))


def wait_until_sent(hub: Hub, count: float, process: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: hub.sent >= count or process.poll() is not None, "bytes")


def killed_and_again(hub: Hub, folder: Path, times: int) -> None:
    total = large(hub)
    chance = random.Random(times)  # noqa: S311
    kills = 0
    for number in range(times):
        directory = folder / f"model{number}"
        hub.sent = 0
        # Of some runs the end is what is killed: the manifest, the record, the renaming.
        after, then = chance.uniform(0, total), 0.0
        if number % 4 == 3:
            after, then = total, chance.uniform(0, 0.2)
        with start(hub, directory) as process:
            wait_until_sent(hub, after, process)
            time.sleep(then)
            process.send_signal(signal.SIGKILL)
        kills += process.returncode == -signal.SIGKILL
        assert directory.exists() != directory.with_name(f"{directory.name}.incomplete").exists()
        already, hub.sent = hub.sent, 0
        with start(hub, directory) as process:
            said = process.communicate(timeout=120)[1].decode()
        assert process.returncode == 0, said
        assert without_manifest(contents(directory)) == model_on(hub)
        assert verify(directory).hashed == len(model_on(hub))
        # Nothing that was written is fetched again: what the sockets held at the kill is, and the lists are.
        assert hub.sent + already < total + 3_000_000
    assert kills > times / 2


def test_killed_at_random_moments_it_ends_complete_and_equal(hub: Hub, tmp_path: Path) -> None:
    killed_and_again(hub, tmp_path, 4)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times_it_ends_complete_and_equal(hub: Hub, tmp_path: Path) -> None:
    killed_and_again(hub, tmp_path, 100)


def test_one_fetch_killed_again_and_again_still_gets_to_its_end(hub: Hub, tmp_path: Path) -> None:
    total = large(hub)
    directory = tmp_path / "model"
    for _ in range(3):
        before = hub.sent
        with start(hub, directory) as process:
            wait_until_sent(hub, before + total / 8, process)
            process.kill()
        assert not directory.exists()
    with start(hub, directory) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert without_manifest(contents(directory)) == model_on(hub)


def test_ctrl_c_says_that_the_same_command_goes_on(hub: Hub, tmp_path: Path) -> None:
    large(hub)
    with start(hub, tmp_path / "model") as process:
        wait_for(lambda: hub.sent > SHARD_BYTES, "bytes")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert f"what is done is kept in {tmp_path / 'model.incomplete'}; run the same command again" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("moment", ["before the folder is renamed", "after it"])
def test_killed_at_the_very_end_nothing_is_fetched_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def die(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "sync_tree" if moment.startswith("before") else "sync_one", die)
        with pytest.raises(MemoryError):
            fetching.fetch(parse_source(f"hf:{NAME}"), tmp_path / "model")
    hub.requests.clear()
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    assert [line for line in hub.requests if "/resolve/" in line and "index" not in line] == []
    assert without_manifest(contents(tmp_path / "model")) == model_on(hub)
    assert not (tmp_path / "model" / STATE).exists()
