from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine import process

ROOT = Path(__file__).parents[2]

# A launcher with a forked and a spawned child, which does what our plugin does; prints their pids and sleeps.
LAUNCHER = """
import multiprocessing, subprocess, sys, time
from engine import process
process.become_launcher()
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
forked.start()
code = "from engine import process; process.follow_launcher(); import time; print('tied', flush=True); time.sleep(600)"
spawned = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
spawned.stdout.readline()
print(forked.pid, spawned.pid, flush=True)
time.sleep(600)
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def read_pids(started: subprocess.Popen[str]) -> list[psutil.Process]:
    assert started.stdout is not None
    return [psutil.Process(int(pid)) for pid in started.stdout.readline().split()]


def assert_gone(processes: list[psutil.Process]) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        alive = [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return
        time.sleep(0.05)
    pytest.fail(f"still alive: {alive}")


def test_children_forked_and_spawned_die_with_a_killed_launcher() -> None:
    launcher = start(LAUNCHER)
    children = read_pids(launcher)
    assert len(children) == 2
    launcher.kill()
    launcher.communicate()
    assert_gone(children)


def test_the_launcher_and_its_children_die_with_a_killed_supervisor() -> None:
    supervisor = start(
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {LAUNCHER!r}], stdout=subprocess.PIPE);"
        "print(p.pid, p.stdout.readline().decode(), flush=True); p.wait()"
    )
    processes = read_pids(supervisor)
    assert len(processes) == 3
    supervisor.kill()
    supervisor.communicate()
    assert_gone(processes)


def test_a_child_whose_launcher_is_already_gone_exits() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = os.environ | {process.LAUNCHER_VARIABLE: str(gone.pid)}
    code = "from engine import process; process.follow_launcher(); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_process_of_the_users_own_is_not_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process.LAUNCHER_VARIABLE, raising=False)
    monkeypatch.setattr(process, "die_with_parent", lambda: pytest.fail("tied"))
    process.follow_launcher()


def test_a_forked_childs_sigterm_ends_the_child_and_does_not_reach_the_parent() -> None:
    code = """
import asyncio, multiprocessing, os, signal, time
from engine import process
process.become_launcher()
async def main():
    heard = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, 1)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    await asyncio.to_thread(child.join)
    await asyncio.sleep(0.2)
    print(child.exitcode, heard)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True, timeout=60
    )
    assert done.stdout.strip() == f"{-signal.SIGTERM} []"


def test_loopback_is_the_default_and_the_users_word_wins() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    process.stay_on_loopback(environment)
    assert environment == {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(("backend", "spans"), [("ray", True), ("mp", False)])
def test_an_engine_whose_workers_ray_starts_is_not_kept_on_loopback(backend: str, spans: bool) -> None:
    arguments = ["--model", "ray", "--distributed-executor-backend", backend, "--port", "1"]
    assert process.spans_machines(arguments) is spans


def test_nothing_heavy_is_imported_before_the_first_datagram() -> None:
    code = "import engine.__main__, sys; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
