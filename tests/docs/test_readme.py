"""README.zh.md has README.md's commands, figures and links. Both are short, and every page's links lead somewhere."""

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
def test_both_have_the_same_links_and_figures(of) -> None:  # type: ignore[no-untyped-def]
    assert of(CHINESE)
    assert of(CHINESE) == of(ENGLISH)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_a_readme_is_read_in_minutes(text: str) -> None:
    assert len(text.splitlines()) <= 100


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings)
    return {heading.lower().replace(" ", "-") for heading in plain}


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "kernels/README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in (link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link
