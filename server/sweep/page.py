"""A sweep as one page: the Pareto plot and every point."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from server.html.document import document, heading, paragraph, table
from server.html.plots import FAINT, INK, SERIES, as_svg, figure
from server.sweep.choose import Candidate, candidates, pareto
from server.sweep.store import Record


def as_html(about: Mapping[str, Any], records: Sequence[Record], best: Candidate | None) -> str:
    """The page; `about` has the conditions, machine, date, command and note."""
    measured = _by_speed(records)
    found = candidates(measured)
    machine = about["machine"]
    parts = [
        paragraph(f"Measured on {about['date']} on {machine['cpu']}, {machine['cores']} cores.", "note"),
        f"<pre>{escape(about['command'])}</pre>",
        *([paragraph(about["note"], "warning")] if about["note"] else []),
        paragraph(f"Best: {best}" if best else "No point was measured that is fast enough.", "ok" if best else "error"),
        heading("Total and each user's tokens per second"),
        paragraph(
            "Up and to the right is better; the line joins what no other point beats in both. Numbers are the table's.",
            "note",
        ),
        _pareto_plot(found, measured, best) if found else paragraph("No point was measured.", "note"),
        heading("Points measured"),
        _measured(measured, best) if measured else "",
        _others(records),
    ]
    return document(f"Sweep of {about['model']}", [part for part in parts if part])


def _by_speed(records: Sequence[Record]) -> list[Record]:
    """The measured records, the largest total at any level of load first."""
    measured = [record for record in records if record.status == "measured"]
    return sorted(measured, key=lambda one: -max(level["tokens_per_s"] for level in one.levels))


def _pareto_plot(found: Sequence[Candidate], measured: Sequence[Record], best: Candidate | None) -> str:
    front = pareto(found)
    with figure(height=4.4) as (drawing, [[axes]]):
        axes.plot([one.user for one in front], [one.total for one in front], "--", color=FAINT, linewidth=1.2, zorder=1)
        for number, level in enumerate(dict.fromkeys(one.level for one in found)):
            at = [one for one in found if one.level == level]
            colour, marker = SERIES[number % len(SERIES)], "os^D"[number % 4]
            axes.plot(
                [one.user for one in at],
                [one.total for one in at],
                marker=marker,
                linestyle="",
                color=colour,
                label=level,
            )
        for one in front:
            named = str(measured.index(one.record) + 1)
            axes.annotate(named, (one.user, one.total), xytext=(10, 4), textcoords="offset points")
        if best is not None:
            axes.plot([best.user], [best.total], marker="o", linestyle="", markersize=15, markerfacecolor="none",
                      markeredgecolor=INK, label="best")  # fmt: skip
        axes.set(xlabel="tokens per second of one user, median", ylabel="tokens per second, all users")
        axes.set_xlim(0, 1.1 * max(one.user for one in found))
        axes.set_ylim(0, 1.1 * max(one.total for one in found))
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.12), ncols=5, borderaxespad=0)
        return as_svg(drawing, "Total tokens per second over one user's, by point of the sweep and level of load")


def _measured(found: Sequence[Record], best: Candidate | None) -> str:
    names = list(dict.fromkeys(name for record in found for name in record.point))
    levels = list(dict.fromkeys(level["level"] for record in found for level in record.levels))
    columns = [f"{level} {what}" for level in levels for what in ("tok/s", "a user", "TTFT ms")]
    rows = []
    for number, record in enumerate(found, 1):
        by_level = {level["level"]: level for level in record.levels}
        cells = [_cell(record.point.get(name)) for name in names]
        cells += [text for level in levels for text in _figures(by_level.get(level))]
        mark = f"{number}, best" if best and record is best.record else str(number)
        rows.append([mark, *cells, _cell(record.ready_s)])
    return table(["point", *names, *columns, "start s"], rows)


def _figures(level: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if level is None or level["user_tokens_per_s"] is None or level["ttft"] is None:
        return ("", "", "")
    return (f"{level['tokens_per_s']:.1f}", f"{level['user_tokens_per_s']:.1f}", f"{level['ttft']['p50'] * 1e3:.0f}")


def _others(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        if record.status != "measured":
            point = " ".join(f"{name}={_cell(value)}" for name, value in record.point.items())
            remedy = f" {record.diagnosis['title']}. {' '.join(record.diagnosis['remedy'])}" if record.diagnosis else ""
            rows.append((point, record.status, record.reason + remedy))
    head = ("point", "came to", "why")
    return heading("Points skipped or failed") + table(head, rows, text=(0, 1, 2)) if rows else ""


def _cell(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
