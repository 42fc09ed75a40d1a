"""An evaluation as lines for a terminal, and as one HTML page that needs nothing beside it (bar charts are SVG)."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeVar

from quant.evaluate.long_output import LongOutputResult
from quant.evaluate.questions import QuestionsResult
from quant.evaluate.run import EvalReport, ModelResult
from quant.evaluate.text import TextResult

T = TypeVar("T")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; } th, td { padding: .25rem .9rem .25rem 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #b8c2cc; } td.number, th.number { text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f5f7; padding: .6rem; }
svg { max-width: 100%; height: auto; } .note { color: #51606e; }
"""
_MAIN = {
    "text": {"perplexity": "perplexity", "perplexity_ratio": "perplexity / source's", "kl": "KL divergence"},
    "questions": {"accuracy": "questions answered rightly", "confidence": "confidence in the right answer"},
    "long_output": {"repetition": "repeated 4-grams", "loop": "ends in a loop", "wrong_script": "wrong script"},
}
_MODEL_COLOUR, _SOURCE_COLOUR = "#2463a8", "#9aa7b4"
_WIDTH, _LABEL_WIDTH, _BAR, _GAP = 720, 180, 16, 14


def as_html(report: EvalReport) -> str:
    """The page."""
    sections = [
        f"<h1>{escape(report.model.name)}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        _text_section(report),
        _questions_section(report),
        _long_section(report),
        "<h2>Settings</h2>",
        _table(("setting", "value"), [(name, _plain(value)) for name, value in report.settings.items()]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Evaluation of {escape(report.model.name)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def as_text(report: EvalReport) -> str:
    """The main figures, one per line, with the source's in parentheses."""
    lines = [report.model.name, *report.notes]
    if report.model.text is not None:
        lines.append(f"tokens measured: {report.model.text.tokens}")
    for part, measures in _MAIN.items():
        results = [getattr(model, part) for model in (report.model, report.source) if model is not None]
        if results[0] is None:
            continue
        for key, what in measures.items():
            values = [format(value, ".4f") for result in results if (value := getattr(result, key)) is not None]
            if values:
                lines.append(f"{what}: {values[0]}" + (f" ({values[1]})" if len(values) > 1 else ""))
    return "\n".join(lines)


def bar_chart(title: str, bars: Mapping[str, Sequence[float | None]], series: Sequence[str], digits: int = 3) -> str:
    """Horizontal bars from zero: one group per key of `bars`, and in it one bar per `series` (None: no bar)."""
    largest = max((value for values in bars.values() for value in values if value is not None), default=0.0) or 1.0
    colours = (_MODEL_COLOUR, _SOURCE_COLOUR)
    room = _WIDTH - _LABEL_WIDTH - 70
    parts, y = [], 34
    for label, values in bars.items():
        middle = y + _BAR * len(series) / 2 + 5
        parts.append(f'<text x="{_LABEL_WIDTH - 10}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for value, colour in zip(values, colours, strict=False):
            if value is not None:
                length = max(room * value / largest, 1)
                parts.append(
                    f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{colour}"/>'
                    f'<text x="{_LABEL_WIDTH + length + 6:.1f}" y="{y + 12}">{value:.{digits}f}</text>'
                )
            y += _BAR
        y += _GAP
    legend, x = [], _LABEL_WIDTH
    for name, colour in zip(series, colours, strict=False):
        legend.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>')
        legend.append(f'<text x="{x + 18}" y="18">{escape(name)}</text>')
        x += 30 + 8 * len(name)
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" font-size="13" font-family="sans-serif" '
        f'fill="#1c2733"><title>{escape(title)}</title>' + "".join(legend + parts) + "</svg>"
    )


def _text_section(report: EvalReport) -> str:
    if report.model.text is None:
        return ""
    rows = [
        ("perplexity", "lower is better", "perplexity", ".3f"),
        ("bits a byte", "lower is better", "bits_per_byte", ".4f"),
        ("perplexity / source's", "1 is the source's", "perplexity_ratio", ".4f"),
        ("KL divergence, nats per token", "0 is the source's", "kl", ".4f"),
        ("KL divergence, 99th percentile", "", "kl_99", ".3f"),
        ("same most likely token", "1 is the source's", "same_top", ".4f"),
    ]
    found = _results(report, TextResult, "text")
    body = [
        (what, *(_number(getattr(result, key), form) for result in found), meaning)
        for what, meaning, key, form in rows
        if getattr(found[0], key) is not None
    ]
    chart = bar_chart("Perplexity", {"perplexity": [result.perplexity for result in found]}, _series(report))
    return f"<h2>Text ({found[0].tokens} tokens)</h2>" + chart + _table(("measure", *_series(report), ""), body)


def _questions_section(report: EvalReport) -> str:
    if report.model.questions is None:
        return ""
    found = _results(report, QuestionsResult, "questions")
    bars = {
        "all": [result.accuracy for result in found],
        "confidence": [result.confidence for result in found],
        **{group.replace("_", " "): [result.accuracy_by[group] for result in found] for group in found[0].accuracy_by},
    }
    wrong = [(name, ", ".join(result.wrong) or "none") for name, result in zip(_series(report), found, strict=True)]
    return (
        f"<h2>Questions ({found[0].questions})</h2>"
        + bar_chart("Accuracy", bars, _series(report), 2)
        + _table(("", "answered wrongly"), wrong)
    )


def _long_section(report: EvalReport) -> str:
    if report.model.long_output is None:
        return ""
    found = _results(report, LongOutputResult, "long_output")
    names = {
        "repetition": "repeated 4-grams",
        "loop": "ends in a loop",
        "wrong_script": "wrong script",
        "broken": "broken characters",
    }
    bars = {label: [getattr(result, key) for result in found] for key, label in names.items()}
    texts = [
        f'<p class="note">{escape(name)} ({escape(output.language)})</p>'
        f"<pre><b>{escape(output.prompt)}</b>{escape(output.text)}</pre>"
        for outputs in zip(*(result.outputs for result in found), strict=True)
        for name, output in zip(_series(report), outputs, strict=True)
    ]
    return "<h2>Long outputs</h2>" + bar_chart("Long outputs", bars, _series(report)) + "".join(texts)


def _series(report: EvalReport) -> tuple[str, ...]:
    return ("model", "source") if report.source else ("model",)


def _results(report: EvalReport, kind: type[T], name: str) -> list[T]:
    models: list[ModelResult] = [report.model, *([report.source] if report.source else [])]
    return [result for result in (getattr(model, name) for model in models) if isinstance(result, kind)]


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
