"""Checks the relative links and anchors of the Markdown documents: `python -m scripts.links`. Needs no network."""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.MULTILINE)
_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


def documents(root: Path = ROOT) -> list[Path]:
    """README, CONTRIBUTING and their like, everything in docs/, and kernels/README.md."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "kernels").glob("*.md")])


def anchors(text: str) -> set[str]:
    """What headings can be linked by, as GitHub names them."""
    found: set[str] = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def broken(document: Path) -> list[str]:
    """One line per link of the document that leads nowhere."""
    lines = []
    for link in _LINK.findall(_CODE.sub("", document.read_text(encoding="utf-8"))):
        if _ELSEWHERE.match(link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            lines.append(f"{document}: {link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            lines.append(f"{document}: {link}: no such heading")
    return lines


def main() -> int:
    """The exit code: 1 where a link is broken."""
    found = [line for document in documents() for line in broken(document)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
