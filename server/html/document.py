"""One HTML page that needs nothing beside it, in the reader's dark or light scheme."""

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2733; --faint: #566573; --grid: #d9dfe5;
  --good: #1d7a46; --warn: #96600a; --bad: #b3261e;
  --series-1: #2166ac; --series-2: #c2571a; --series-3: #1d7a46; --series-4: #8250a8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14191f; --ink: #e4e9ee; --faint: #9fadba; --grid: #36414c;
  --good: #5cc98a; --warn: #e0a94a; --bad: #ff8a80;
  --series-1: #6cb0f2; --series-2: #f0955a; --series-3: #5cc98a; --series-4: #c49be8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 66rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; border-bottom: 1px solid var(--grid); color: var(--faint); }
th.text, td.text { text-align: left; white-space: normal; min-width: 7rem; }
svg { width: 100%; min-width: 38rem; height: auto; } svg text { font-family: system-ui, sans-serif; }
.note { color: var(--faint); } .ok { color: var(--good); }
.warning { color: var(--warn); } .error { color: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--grid); padding-left: .8rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; color: var(--faint); }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """The page: `parts` are elements, written one below the other under the title."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(f'<div class="wide">{part}</div>' if part.startswith("<svg") else part for part in parts if part)
        + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    """A section's heading."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is a class of the style sheet, such as note."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """A table; columns whose numbers are in `text` hold text, the others figures."""

    def row(cells: Sequence[str], tag: str) -> str:
        words = (' class="text"' if column in text else "" for column in range(len(cells)))
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, words, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f'<div class="wide"><table><tr>{row(head, "th")}</tr>{body}</table></div>'


def definitions(entries: Sequence[tuple[str, str]]) -> str:
    """Terms and their meanings."""
    return "<dl>" + "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in entries) + "</dl>"
