"""Runtime folders of ended processes are removed; everything else stays."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from server.run.lifetime import runtime_folder


@pytest.fixture
def tmp(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp))
    return short_tmp


def abandoned(tmp: Path, name: str) -> Path:
    """A folder as a killed process leaves it."""
    folder = tmp / name
    folder.mkdir(mode=0o700)
    (folder / "owner").touch()
    (folder / "engine.sock").touch()
    return folder


def test_what_a_killed_process_left_is_removed(tmp: Path) -> None:
    left = [abandoned(tmp, f"voltserve-{index}") for index in range(3)]
    with runtime_folder() as own:
        assert not any(folder.exists() for folder in left)
        assert own.is_dir()
    assert not list(tmp.iterdir())


def test_what_belongs_to_a_living_process_stays(tmp: Path) -> None:
    with runtime_folder() as first, runtime_folder() as second:
        assert first.is_dir()
        assert second.is_dir()


def test_what_is_not_surely_a_runtime_folder_stays(tmp: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "owner").touch()
    (elsewhere / "precious").touch()
    (tmp / "voltserve-link").symlink_to(elsewhere)
    (tmp / "voltserve-file").touch()
    (tmp / "voltserve-smoke-1").mkdir()
    (tmp / "other-1").mkdir()
    (tmp / "other-1" / "owner").touch()
    linked = abandoned(tmp, "voltserve-a")
    (linked / "owner").unlink()
    (linked / "owner").symlink_to(elsewhere / "owner")
    inside = abandoned(tmp, "voltserve-b")
    (inside / "link").symlink_to(elsewhere)
    before = {path.name for path in tmp.iterdir()}
    with runtime_folder() as own:
        assert {path.name for path in tmp.iterdir()} == before - {"voltserve-b"} | {own.name}
    assert (elsewhere / "precious").exists()


def test_another_user_s_folder_stays(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = abandoned(tmp, "voltserve-theirs")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with runtime_folder():
        assert folder.exists()


def test_a_folder_is_never_seen_without_its_lock(tmp: Path) -> None:
    unlocked: list[Path] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for owner in tmp.glob("voltserve-*/owner"):
                try:
                    file = os.open(owner, os.O_WRONLY)
                except FileNotFoundError:
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if owner.exists() and os.fstat(file).st_nlink:
                        unlocked.append(owner)
                except BlockingIOError:
                    pass
                finally:
                    os.close(file)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(200):
        with runtime_folder() as folder:
            assert folder.is_dir()
    ended.set()
    thread.join()
    assert unlocked == []
