"""docs/architecture.md names every module, and every path that it names exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROOMS = ("server", "engine", "quant", "kernels", "perfmodel", "lookalikes", "trials", "scripts")
KINDS = (".py", ".sh", ".cuh", ".cu", ".cpp", ".h", ".inl")


def modules() -> set[Path]:
    """The source files of every room, but for packages' `__init__.py`."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = (ROOT / name for name in listed.splitlines())
    return {file for file in files if file.suffix in KINDS and file.name != "__init__.py" and file.exists()}


def rows() -> list[tuple[Path, str]]:
    """The folder that the last heading names, and each name in the first cell of a row."""
    found, folder = [], ROOT
    for line in TEXT.splitlines():
        if line.startswith("#"):
            named = re.search(r"`([\w/]+)/`", line)
            folder = ROOT / named[1] if named else ROOT
        elif re.match(r"\| `", line):
            first_cell = line.split(" | ")[0]
            found += [(folder, name) for name in re.findall(r"`([^`]+)`", first_cell) if "." in name]
    return found


def test_every_row_names_a_file() -> None:
    assert rows()
    assert [f"{folder.relative_to(ROOT)}: {name}" for folder, name in rows() if not list(folder.glob(name))] == []


def test_every_module_has_a_row() -> None:
    named = {path for folder, name in rows() for path in folder.glob(name)}
    assert [str(path.relative_to(ROOT)) for path in sorted(modules() - named)] == []


def test_every_path_in_the_text_exists() -> None:
    tops = "|".join((*ROOMS, "configs", "docs", "tests", "requirements"))
    paths = set(re.findall(rf"`((?:{tops})/[\w/.*-]*)`", TEXT))
    assert paths
    assert [path for path in sorted(paths) if not list(ROOT.glob(path.rstrip("/")))] == []


def test_the_glossary_is_short_and_in_one_place() -> None:
    glossary = TEXT[TEXT.index("## Glossary") :]
    words = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]
    assert 25 <= len(words) <= 40
    assert len(set(words)) == len(words)
