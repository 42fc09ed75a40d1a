"""Links of documents that lead nowhere are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.links import anchors, broken


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.md", ""),
        ("other.md#two-words", ""),
        ("#here", ""),
        ("https://example.org/nowhere", ""),
        ("missing.md", "no such file"),
        ("other.md#three", "no such heading"),
        ("#there", "no such heading"),
    ],
)
def test_a_link_leads_to_a_file_and_a_heading(tmp_path: Path, link: str, problem: str) -> None:
    (tmp_path / "other.md").write_text("# Two words\n")
    document = tmp_path / "document.md"
    document.write_text(f"# Here\n\nSee [this]({link}), not `[that](nowhere)`.\n")
    assert [line.rpartition(": ")[2] for line in broken(document)] == ([problem] if problem else [])


def test_headings_are_named_as_github_names_them() -> None:
    text = "# One, `two`!\n```\n# no heading\n```\n## A\n## A\n### [Linked](x.md) (part)\n"
    assert anchors(text) == {"one-two", "a", "a-1", "linked-part"}
