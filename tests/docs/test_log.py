"""The log is newest first and its index whole; every result file that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOG = (ROOT / "docs/log.md").read_text(encoding="utf-8")
TITLES = [title for title in re.findall(r"^## (.+)$", LOG, re.MULTILINE) if title != "By topic"]


def test_entries_are_dated_and_newest_first() -> None:
    dates = [title[:10] for title in TITLES]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d · .+", title) for title in TITLES)
    assert dates == sorted(dates, reverse=True)


def test_the_index_names_every_entry_once() -> None:
    index = LOG[LOG.index("## By topic") : LOG.index(f"## {TITLES[0]}")]
    assert sorted(re.findall(r"^- \[(.+?)\]\(#", index, re.MULTILINE)) == sorted(TITLES)


def test_every_result_file_that_is_named_exists() -> None:
    named = set(re.findall(r"docs/results/[\w./-]+\.(?:jsonl|json|svg|txt)", LOG))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_archive_has_an_index() -> None:
    archive = ROOT / "docs/results/archive"
    index = (archive / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in archive.iterdir()} - {"README.md"}
    assert set(re.findall(r"^\| \[([^]]+)\]", index, re.MULTILINE)) == files
