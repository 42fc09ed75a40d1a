"""README.zh.md says nothing that README.md does not: each of its figures, links and commands is there too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)#]+)", text)) - {"README.md", "README.zh.md"}


def figures(text: str) -> set[str]:
    """The numbers in the cells of tables, but for those in code."""
    rows = [re.sub(r"`[^`]*`", "", line) for line in text.splitlines() if line.startswith("|")]
    return {number for row in rows for number in re.findall(r"\d+(?:\.\d+)?", row)}


def commands(text: str) -> list[str]:
    """The lines of fenced blocks, without their comments and what stands in brackets."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"\s*\[[^]]*\]|\s+#.*", "", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def test_both_have_the_same_commands_in_the_same_order() -> None:
    assert commands(CHINESE)
    assert commands(CHINESE) == commands(ENGLISH)


@pytest.mark.parametrize("of", [links, figures])
def test_the_chinese_readme_keeps_to_the_english_one(of) -> None:  # type: ignore[no-untyped-def]
    assert of(CHINESE)
    assert of(CHINESE) - of(ENGLISH) == set()


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "README.zh.md",
        "docs/quickstart.md",
        "docs/clients.md",
        "docs/cluster.md",
        "docs/engines.md",
        "docs/operate.md",
        "CHANGELOG.md",
    ],
)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    local = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert local
    assert [link for link in local if not (page.parent / link).exists()] == []
