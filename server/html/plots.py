"""Plots as SVG inside a page: text stays text, and colours are the page's, so that they follow its colour scheme.

matplotlib writes colours as numbers. Each number here stands for a variable of the page's style sheet
(server/html/document.py), which replaces it in matplotlib's output.
"""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
SERIES = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14")
_VARIABLES = {
    **{INK: "ink", FAINT: "faint", GRID: "grid"},
    **{colour: f"series-{number}" for number, colour in enumerate(SERIES, 1)},
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "voltserve",  # the same plot is the same text each time
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


@contextmanager
def figure(
    rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 3.6
) -> Iterator[tuple["Figure", list[list["Axes"]]]]:
    """A figure of `rows` times `columns` plots, by row; columns share their x axis, rows their y axis. Inches.

    To be drawn inside the `with`, where the style holds.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it logs that it has made its list of fonts
    with mpl.rc_context(_STYLE):
        drawing = Figure(figsize=(width, height), layout="constrained")
        yield drawing, drawing.subplots(rows, columns, sharex="col", sharey="row", squeeze=False).tolist()


def as_svg(drawing: "Figure", title: str) -> str:
    """The figure as an SVG element for a page; `title` says what it shows to those who cannot see it."""
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[a-z0-9]+_\d+"', "", text)  # names of groups, which would repeat on a page of several plots
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    head = text[: text.index(">")]
    named = re.sub(r' (?:width|height|version|xmlns(?::\w+)?)="[^"]*"', "", head)
    return f'{named} role="img" aria-label="{escape(title)}"{text[len(head) :]}'.strip()
