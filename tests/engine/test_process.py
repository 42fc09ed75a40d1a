from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine import environment, process

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
    variables = os.environ | {environment.LAUNCHER: str(gone.pid)}
    code = "from engine import process; process.follow_launcher(); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_process_of_the_users_own_is_not_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.LAUNCHER, raising=False)
    monkeypatch.setattr(process, "die_with_parent", lambda _parent: pytest.fail("tied"))
    process.follow_launcher()


# A child that outlives its parent, which is killed, for a while. It prints once it runs without the parent.
BEFORE_IT_IS_TIED = {
    "launcher": """
import os, subprocess, sys, time
code = "import time; time.sleep(1); from engine import process; process.become_launcher(); print('alive', flush=True)"
environment = os.environ | {"VOLTSERVE_ENGINE_SUPERVISOR": str(os.getpid())}
print(subprocess.Popen([sys.executable, "-c", code], env=environment).pid, flush=True)
time.sleep(600)
""",
    "forked": """
import os, time
from engine import process
os.register_at_fork(after_in_child=lambda: time.sleep(1))
process.become_launcher()
if (child := os.fork()) == 0:
    print("alive", flush=True)
    os._exit(0)
print(child, flush=True)
time.sleep(600)
""",
    "spawned": """
import multiprocessing, os, time
from engine import environment, process
def untied():
    import time
    from engine import process
    time.sleep(1)
    process.follow_launcher()
    print("alive", flush=True)
os.environ[environment.LAUNCHER] = str(os.getppid())  # which lives on: only the parent is killed
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=untied)
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
""",
}


@pytest.mark.parametrize("kind", BEFORE_IT_IS_TIED)
def test_a_child_whose_parent_is_killed_before_it_is_tied_exits(tmp_path: Path, kind: str) -> None:
    (tmp_path / "parent.py").write_text(BEFORE_IT_IS_TIED[kind])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    children = read_pids(parent)
    assert [child.is_running() for child in children] == [True]
    parent.kill()
    said, _ = parent.communicate(timeout=60)  # until all who could say something have ended
    assert said == ""
    assert_gone(children)


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
