"""Chinese pages have the English ones' commands, figures and links. READMEs are short, and all links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = [
    (ROOT / name, (ROOT / name).with_suffix(".zh.md"))
    for name in ("README.md", "docs/quickstart.md", "docs/clients.md", "docs/models.md")
]
of_each_pair = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda page: page.name)


def links(text: str) -> set[str]:
    """Where a page leads, but for the other language's page of the same name."""
    found = {link.replace(".zh.md", ".md") for link in re.findall(r"\]\(([^)#]+)", text)}
    return found - {english.name for english, _ in PAIRS}


def figures(text: str) -> set[str]:
    """The numbers in the cells of tables, but for those in code."""
    rows = [re.sub(r"`[^`]*`", "", line) for line in text.splitlines() if line.startswith("|")]
    return {number for row in rows for number in re.findall(r"\d+(?:\.\d+)?", row)}


def commands(text: str) -> list[str]:
    """The lines of fenced blocks, without their comments and what stands in brackets."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"\s*\[[^]]*\]|\s+#.*", "", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


@of_each_pair
def test_both_have_the_same_commands_in_the_same_order(english: Path, chinese: Path) -> None:
    there = commands(chinese.read_text(encoding="utf-8"))
    assert there
    assert there == commands(english.read_text(encoding="utf-8"))


@of_each_pair
@pytest.mark.parametrize("of", [links, figures])
def test_both_have_the_same_links_and_figures(of: Callable[[str], set[str]], english: Path, chinese: Path) -> None:
    assert of(chinese.read_text(encoding="utf-8")) == of(english.read_text(encoding="utf-8"))


@of_each_pair
def test_both_have_the_same_sections_and_lead_to_each_other(english: Path, chinese: Path) -> None:
    texts = [page.read_text(encoding="utf-8") for page in (english, chinese)]
    levels = [
        re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
        for text in texts
    ]
    assert levels[0] == levels[1]
    assert f"]({chinese.name})" in texts[0]
    assert f"]({english.name})" in texts[1]


@pytest.mark.parametrize("page", PAIRS[0], ids=["en", "zh"])
def test_a_readme_is_read_in_minutes(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 100


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
