"""Pages with figures are as the result files have them (`python -m scripts.figures --check`)."""

from __future__ import annotations

import pytest

from scripts.figures.pages import ROOT, load, pages

PAGES = pages(load())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_of_figures_is_stale(page) -> None:  # type: ignore[no-untyped-def]
    assert page.read_text(encoding="utf-8") == PAGES[page], "stale: run `python -m scripts.figures`"
