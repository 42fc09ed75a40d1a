"""A run as one page: its table and plots, the figures of the reference document and of peers, and definitions."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from server.bench.load import Closed
from server.bench.measures import Summary, summarize, timeline
from server.bench.peers import load_peers
from server.bench.run import LevelResult
from server.html.document import definitions, document, heading, paragraph, table
from server.html.plots import FAINT, SERIES, as_svg, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CENTRED: Mapping[str, Any] = {"textcoords": "offset points", "ha": "center"}
_WORDS = (
    ("load", "×8: eight users, each sends its next request once the last is answered. 2/s: requests arrive at random."),
    ("tok/s", "output tokens of all users per second, over the whole level, prompts included"),
    ("tok/s a user", "the reciprocal of the median of a request's mean time a token, its first token left out"),
    ("TTFT", "from sending a request (2/s: from when it was due) to its first text"),
    ("ITL", "between two pieces of one answer's text, all answers together"),
    ("E2E", "from sending a request (2/s: from when it was due) to its last text"),
    ("p50, p99", "half, or 99 of 100, are at most this long"),
)


def as_html(report: Mapping[str, Any], results: Sequence[LevelResult]) -> str:
    """The page of `report` (the contents of bench.json) and the results it was made of."""
    summaries = [summarize(result) for result in results]
    server, machine = report["server"], report["machine"]
    about = ", ".join(f"{name} {value}" for name, value in server.items() if name not in {"model", "gpus"})
    gpus = "; " + ", ".join(server["gpus"]) if server.get("gpus") else ""
    parts = [
        paragraph(f"{server['model']}. {about}{gpus}"),
        paragraph(
            f"Measured on {report['date']}; load from {machine['cpu']}, {machine['cores']} cores, load average "
            f"{machine['load_average']} before. {report['input_tokens']} tokens in, {report['output_tokens']} out.",
            "note",
        ),
        f"<pre>{escape(report['command'])}</pre>",
        *([paragraph(report["note"], "warning")] if report["note"] else []),
        *(paragraph(text, "warning") for text in report["warnings"]),
        _main_table(summaries),
        _errors(summaries),
        heading("Throughput and latency"),
        _throughput_plot(summaries),
        heading("Time to first token"),
        _percentile_plot(summaries, "ttft", "time to first token"),
        heading("Between tokens"),
        _percentile_plot(summaries, "itl", "between two pieces of text"),
        heading("Timeline"),
        _timeline_plot(results),
        *_beside(summaries),
        heading("Words"),
        definitions(_WORDS),
    ]
    return document(f"Load on {server['model']}", parts)


def _main_table(summaries: Sequence[Summary]) -> str:
    head = ["load", "requests", "failed", "tok/s", "tok/s a user", "TTFT ms p50", "p90", "p99", "ITL ms p50", "p99"]
    head += ["E2E s p50", "p99"]
    rows = []
    for one in summaries:
        user = "" if one.user_tokens_per_s is None else f"{one.user_tokens_per_s:.1f}"
        cells = [one.level, str(one.requests), str(one.failed), f"{one.tokens_per_s:.1f}", user]
        cells += _cells(one, "ttft", ("p50", "p90", "p99"), 1e3) + _cells(one, "itl", ("p50", "p99"), 1e3)
        rows.append(cells + _cells(one, "e2e", ("p50", "p99"), 1))
    return table(head, rows)


def _cells(summary: Summary, name: str, percentiles: Sequence[str], scale: float) -> list[str]:
    found = getattr(summary, name)
    return ["" if found is None else f"{getattr(found, one) * scale:.{1 if scale > 1 else 2}f}" for one in percentiles]


def _errors(summaries: Sequence[Summary]) -> str:
    rows = [(one.level, str(count), error) for one in summaries for error, count in one.errors.items()]
    return heading("Failed requests") + table(("load", "requests", "error"), rows, text=(0, 2)) if rows else ""


def _throughput_plot(summaries: Sequence[Summary]) -> str:
    shown = [(one, one.tpot) for one in summaries if one.tpot is not None]
    if not shown:
        return paragraph("No answer had two tokens.", "note")
    with figure(height=4.0) as (drawing, [[axes]]):
        for colour, percentile in zip(SERIES, ("p50", "p99"), strict=False):
            for loop, style, marker in (("closed", "-", "o"), ("open", ":", "D")):
                points = [
                    (one.tokens_per_s, getattr(tpot, percentile) * 1e3) for one, tpot in shown if one.loop == loop
                ]
                if points:
                    label = f"{percentile}, open loop" if loop == "open" else percentile
                    axes.plot(*zip(*points, strict=True), linestyle=style, marker=marker, color=colour, label=label)
        for one, tpot in shown:
            axes.annotate(one.level, (one.tokens_per_s, tpot.p50 * 1e3), xytext=(0, -18), **_CENTRED)
        axes.set(xlabel="output tokens per second, all users", ylabel="ms per token, of a request")
        axes.set_xlim(0, _room_for(one.tokens_per_s for one, _ in shown))
        axes.set_ylim(0, _room_for(1e3 * tpot.p99 for _, tpot in shown))
        _legend(axes)
        return as_svg(drawing, "Milliseconds per token over tokens per second, one point per level of load")


def _percentile_plot(summaries: Sequence[Summary], name: str, what: str) -> str:
    shown = [(one, getattr(one, name)) for one in summaries if getattr(one, name) is not None]
    if not shown:
        return paragraph("No request succeeded.", "note")
    with figure() as (drawing, [[axes]]):
        for colour, percentile, marker in zip(SERIES, ("p50", "p90", "p99"), "os^", strict=False):
            for loop, style in (("closed", "-"), ("open", "")):
                points = [(one.level, getattr(found, percentile) * 1e3) for one, found in shown if one.loop == loop]
                if points:
                    label = percentile if loop == shown[0][0].loop else None
                    axes.plot(*zip(*points, strict=True), linestyle=style, marker=marker, color=colour, label=label)
        axes.set(xlabel="load", ylabel=f"ms {what}")
        axes.set_ylim(0, _room_for(1e3 * found.p99 for _, found in shown))
        _legend(axes)
        return as_svg(drawing, f"Milliseconds {what} by load: median, 90th and 99th percentile")


def _timeline_plot(results: Sequence[LevelResult]) -> str:
    """One column per level, because levels differ too much in length for a common axis."""
    with figure(rows=2, columns=len(results), height=4.4) as (drawing, (rates, users)):
        for result, rate_axes, user_axes in zip(results, rates, users, strict=True):
            rows = timeline(result.outcomes, result.seconds)
            moments = [moment for moment, _, _ in rows]
            rate_axes.plot(moments, [rate for _, rate, _ in rows], color=SERIES[0], linewidth=1.4)
            user_axes.plot(moments, [busy for _, _, busy in rows], color=SERIES[1], linewidth=1.4)
            rate_axes.set_title(result.level.label)
            user_axes.set_xlim(0, result.seconds)
            user_axes.locator_params(axis="x", nbins=3)
        rates[0].set_ylabel("tokens per second")
        users[0].set_ylabel("requests in flight")
        rates[0].set_ylim(bottom=0)
        users[0].set_ylim(bottom=0)
        drawing.supxlabel("seconds since the level began", fontsize="medium", color=FAINT)
        return as_svg(drawing, "Tokens per second and requests in flight over time, one column per level of load")


def _room_for(values: Iterable[float]) -> float:
    """Where an axis from 0 ends."""
    return 1.1 * max(values) or 1.0


def _legend(axes: "Axes") -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.14), ncols=4, borderaxespad=0)


def _beside(summaries: Sequence[Summary]) -> list[str]:
    """The figures of others: never in one plot with ours, since machines and models differ."""
    found = load_peers()
    ours = {one.level: one for one in summaries}
    reference = found.reference
    users = sorted({*reference.tokens_per_s, *(one.streams for one in map(_closed, summaries) if one)})
    rows = []
    for number in users:
        mine = ours.get(Closed(number).label)
        theirs = reference.tokens_per_s.get(number)
        rows.append(
            (
                f"×{number}",
                "" if mine is None else f"{mine.tokens_per_s:.1f}",
                "" if mine is None or mine.ttft is None else f"{mine.ttft.p50 * 1e3:.0f}",
                "" if theirs is None else f"{theirs:g}",
            )
        )
    low, high = reference.ttft_ms
    claims = [
        (one.who, one.setup, ", ".join(f"×{number}: {rate:g}" for number, rate in one.tokens_per_s.items()))
        for one in found.peers
    ]
    return [
        heading("Beside the reference document"),
        paragraph(
            f"Theirs: {reference.title}; TTFT {low:g} to {high:g} ms; {reference.note}. Another machine and another "
            "model than measured here, unless the first lines of this page say the same.",
            "note",
        ),
        table(("users", "tok/s here", "TTFT ms p50 here", "tok/s, theirs"), rows),
        heading("What others report on V100s"),
        paragraph("Their own claims, none measured by us: total tokens per second by users.", "note"),
        table(("who", "on what", "tok/s, theirs"), claims, text=(0, 1, 2)),
    ]


def _closed(summary: Summary) -> Closed | None:
    return Closed(int(summary.level.removeprefix("×"))) if summary.loop == "closed" else None
