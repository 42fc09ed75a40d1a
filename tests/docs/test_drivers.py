"""Every list of the drivers that run V100s names all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVERS = ("535", "550", "570", "580")
# Two of them in a row are a list.
LIST = re.compile(r"\b(?:535|550|570|580)\b(?:(?:, | and | or |, and |, or |/)\b(?:535|550|570|580)\b)+")
SOURCES = sorted(
    path
    for folder in ("docs", "configs", "server", "scripts", ".")
    for kind in ("*.md", "*.yaml", "*.yml", "*.py", "*.sh")
    for path in ((ROOT / folder).glob(kind) if folder == "." else (ROOT / folder).rglob(kind))
    if path != ROOT / "docs/log.md"
)


@pytest.mark.parametrize("text", ["535, 550, 570 and 580", "535, 550 or 570", "535/550"])
def test_lists_are_found(text: str) -> None:
    assert LIST.search(text)


def test_each_list_is_whole() -> None:
    lists = [(path, found[0]) for path in SOURCES for found in LIST.finditer(path.read_text(encoding="utf-8"))]
    assert {path.name for path, _ in lists} >= {"quickstart.md", "troubleshooting.md", "errors.yaml", "gpu_findings.py"}
    assert [(path, text) for path, text in lists if tuple(re.findall(r"\d+", text)) != DRIVERS] == []
