"""What another vLLM release changes, on two small releases that are made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer import BadParameter
from typer.testing import CliRunner

from scripts.engine_diff import main
from trials import engine_diff

BEFORE = {
    "__init__.py": "",
    "moved.py": "def gone(a):\n    return a\n",
    "kept.py": "from vllm.base import Base\n\n\nclass Kept(Base):\n    def same(self):\n        return 1\n",
    "base.py": "class Base:\n    def inherited(self, a, b=1):\n        return a\n",
    "body.py": 'def work(a):\n    """Old words."""\n    return a\n',
}
AFTER = BEFORE | {
    "moved.py": "",
    "elsewhere.py": BEFORE["moved.py"],
    "base.py": "class Base:\n    def inherited(self, a, c=2):\n        return a\n",
    "body.py": 'def work(a):\n    """New words."""\n    return a + 1\n',
}
OURS = """
from vllm.moved import gone
from vllm.kept import Kept

WORK = "vllm.body:work"


class Mine(Kept):
    def same(self):
        return 2

    def inherited(self, a, b=1):
        return b
"""


def release(folder: Path, files: dict[str, str]) -> Path:
    (folder / "vllm").mkdir(parents=True)
    for name, text in files.items():
        (folder / "vllm" / name).write_text(text)
    return folder


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path, Path]:
    ours = tmp_path / "ours"
    (ours / "engine").mkdir(parents=True)
    (ours / "engine" / "overlay.py").write_text(OURS)
    return release(tmp_path / "before", BEFORE), release(tmp_path / "after", AFTER), ours


def test_missing_names_say_where_they_are_now_and_changed_ones_what_changed(releases: tuple[Path, Path, Path]) -> None:
    before, after = map(engine_diff.Release, releases[:2])
    found = {str(name): engine_diff.compare(name, before, after) for name in engine_diff.used(releases[2])}
    assert found == {
        "vllm.moved:gone": "missing; now in vllm.elsewhere",
        "vllm.kept:Kept": None,
        "vllm.kept:Kept.same": None,
        "vllm.kept:Kept.inherited": "signature: without b=1; with c=2",
        "vllm.body:work": "body: 2 lines",
    }


def test_a_missing_name_is_a_failure(releases: tuple[Path, Path, Path]) -> None:
    import typer

    app = typer.Typer()
    app.command()(main)
    before, after, ours = map(str, releases)
    done = CliRunner().invoke(app, [before, after, "--root", ours])
    assert done.exit_code == 1
    assert "5 names; 1 missing, 2 changed" in done.output
    assert CliRunner().invoke(app, [before, before, "--root", ours]).exit_code == 0


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="expected a folder that holds vllm"):
        engine_diff.Release(tmp_path)
