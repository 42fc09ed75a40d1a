"""Host, disk and trials: read from folders and programs of the test's own."""

import os
import socket
from pathlib import Path

import pytest

from server.doctor.disk import MOST_BYTES, block_device, measure, read_disk
from server.doctor.host import read_host
from server.doctor.trial import run_trial
from tests.server.conftest import alive, wait_for


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 2048 kB\n")
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_a_bare_host_is_read(root: Path) -> None:
    host = read_host("127.0.0.1", 0, root, lambda _: None)
    assert (host.memory_available, host.shared_memory, host.device_nodes) == (2**21, None, ())
    assert not (host.container or host.docker or host.container_toolkit)
    assert host.cores >= 1


def test_a_container_with_gpus_is_read(root: Path) -> None:
    (root / ".dockerenv").touch()
    (root / "dev" / "shm").mkdir()
    (root / "dev" / "nvidia0").touch()
    (root / "dev" / "nvidiactl").touch()
    host = read_host("127.0.0.1", 0, root, lambda name: f"/usr/bin/{name}")
    assert host.container
    assert host.docker
    assert host.container_toolkit
    assert host.shared_memory
    assert host.device_nodes == (str(root / "dev" / "nvidia0"),)


def test_a_port_in_use_is_found(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in read_host("127.0.0.1", port, root).port_problem
    assert read_host("127.0.0.1", 0, root).port_problem == ""


@pytest.mark.parametrize(("flag", "rotates"), [("0\n", False), ("1\n", True)])
def test_a_partition_s_disk_says_whether_it_rotates(tmp_path: Path, flag: str, rotates: bool) -> None:
    disk = tmp_path / "devices" / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue" / "rotational").write_text(flag)
    (disk / "sda1").mkdir()
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (links / "8:0").symlink_to(disk)
    (links / "8:1").symlink_to(disk / "sda1")
    assert block_device(os.makedev(8, 1), tmp_path) == ("sda", rotates)
    assert block_device(os.makedev(8, 0), tmp_path) == ("sda", rotates)


def test_a_file_system_without_a_disk_is_unknown(tmp_path: Path) -> None:
    assert block_device(os.makedev(0, 42), tmp_path) == ("", None)


def test_the_largest_shard_is_read_and_all_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 5000)
    disk = read_disk(tmp_path)
    assert disk is not None
    assert (Path(disk.path).name, disk.model_bytes, disk.read_bytes) == ("b.safetensors", 6000, 5000)
    assert disk.speed > 0


def test_reading_is_bounded_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 2**30)
    read, seconds, method = measure(path)
    assert read <= MOST_BYTES
    assert seconds > 0
    assert method in {"direct", "dropped"}


def test_a_folder_without_shards_has_nothing_to_measure(tmp_path: Path) -> None:
    assert read_disk(tmp_path) is None


def test_a_trial_s_last_line_is_its_answer() -> None:
    trial = run_trial(["-c", "print('noise'); print('{\"wrong\": 0}')"])
    assert trial.answer == {"wrong": 0}
    assert not trial.problem


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("raise SystemExit('no GPU')", "exited with 1: no GPU"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exited with -11"),
        ("print('hello')", "expected one JSON object"),
        ("", "expected one JSON object"),
    ],
)
def test_a_trial_that_fails_says_how(program: str, problem: str) -> None:
    trial = run_trial(["-c", program])
    assert problem in trial.problem
    assert not trial.timed_out


def test_a_trial_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)"
    )
    trial = run_trial(["-c", program], limit=3)
    assert trial.timed_out
    assert trial.problem == "no answer within 3 s"
    wait_for(lambda: not [pid for pid in pids.read_text().split() if alive(int(pid))], "all of it gone")
