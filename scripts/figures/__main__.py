"""`python -m scripts.figures [--check]`: writes the pages that hold figures, or fails where one is stale."""

from __future__ import annotations

import argparse
import sys

from scripts.figures.expressions import FigureError
from scripts.figures.pages import ROOT, load, pages


def main() -> int:
    """Writes or checks the pages; the exit code is 1 where one is stale or a figure cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m scripts.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    check = parser.parse_args().check
    try:
        wanted = pages(load())
    except FigureError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    for page in stale:
        name = page.relative_to(ROOT)
        if check:
            print(f"figures: {name} is stale; run `python -m scripts.figures`", file=sys.stderr)
        else:
            page.write_text(wanted[page], encoding="utf-8")
            print(f"figures: wrote {name}")
    return 1 if check and stale else 0


sys.exit(main())
