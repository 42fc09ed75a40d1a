"""A build's engine reads no cache of another build."""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import pytest

from server.config import caches
from server.config.devices import Devices
from server.config.render import render_launch
from server.config.settings import load_config

NONE = Devices((), "no driver")


def variables(environ: Mapping[str, str], *flags: str) -> dict[str, str]:
    config = load_config(["--model", "m", *flags], {}, lambda: NONE)
    env = render_launch(config, Path("/run/x"), environ).env
    return {name: env[name] for name in caches.FOLDERS if name in env}


@pytest.fixture
def another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "this_build", lambda: "another")


def test_every_cache_lies_in_the_build_s_own_folder() -> None:
    folder = f"/home/me/.cache/voltserve/build-{caches.this_build()}"
    assert variables({"HOME": "/home/me"}) == {name: f"{folder}/{kind}" for name, kind in caches.FOLDERS.items()}


@pytest.mark.usefixtures("another_build")
def test_another_build_has_another_folder() -> None:
    assert set(variables({"XDG_CACHE_HOME": "/c", "HOME": "/home/me"}).values()) == {
        f"/c/voltserve/build-another/{kind}" for kind in caches.FOLDERS.values()
    }


def test_a_folder_that_the_user_set_is_used() -> None:
    assert variables({"HOME": "/h", "VLLM_CACHE_ROOT": "/mine"})["VLLM_CACHE_ROOT"] == "/mine"


def test_without_a_home_the_libraries_choose() -> None:
    assert variables({}) == {}


@pytest.mark.parametrize("name", caches.DISTRIBUTIONS)
def test_another_version_of_any_part_is_another_build(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here, version = caches.this_build(), importlib.metadata.version
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", lambda asked: "9.9" if asked == name else version(asked))
        assert caches.this_build.__wrapped__() != here
    assert caches.this_build.__wrapped__() == here


def test_kernels_built_again_are_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    here = caches.this_build()
    monkeypatch.setattr(caches, "_files_of", lambda _: "voltserve_kernels/_C.so,sha256=0,1")
    assert caches.this_build.__wrapped__() != here


def test_any_changed_source_is_another_build(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    names: set[str] = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("steps/b.py", ""), ("steps/b.py", "2"), ("c.txt", "no part")):
        (tmp_path / name).write_text(content)
        names.add(caches.build_of(["1"], [tmp_path]))
    assert len(names) == 4
    assert caches.build_of(["1"], [tmp_path]) != caches.build_of(["2"], [tmp_path])


def test_the_sources_are_there() -> None:
    """A folder that is missing would leave its sources out of the build's name."""
    assert all(list((caches.ROOT / name).rglob("*.py")) for name in caches.SOURCES)
