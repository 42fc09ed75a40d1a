"""The steps for a terminal, as JSON and as a page."""

from collections.abc import Sequence
from html import escape
from typing import Any

from server.html.document import document, heading, paragraph, table
from server.machine import describe_machine, today
from server.smoke.steps import Step, Verdict, worst

_MARKS: dict[Verdict, str] = {"ok": "ok", "warning": "WARNING", "error": "ERROR", "skipped": "skipped"}


def verdict_of(steps: Sequence[Step]) -> Verdict:
    """The worst of all."""
    return worst([step.result.verdict for step in steps])


def step_text(step: Step) -> str:
    """A step's lines; only the first line of a successful step."""
    lines = [f"{_MARKS[step.result.verdict]:<7}  {step.name:<14}  {step.seconds:6.1f} s  {step.result.summary}"]
    if step.result.verdict != "ok":
        lines += [f"         {line}" for detail in step.result.details for line in detail.splitlines()]
    return "\n".join(lines)


def verdict_text(steps: Sequence[Step]) -> str:
    """The last line."""
    counts = [f"{sum(step.result.verdict == one for step in steps)} {one}" for one in ("error", "warning", "skipped")]
    verdict = verdict_of(steps)
    summary = {"error": "NOT ok", "warning": "ok, with warnings"}.get(verdict, "ok")
    return f"{summary}: {len(steps)} steps, {', '.join(counts)}"


def as_dict(steps: Sequence[Step]) -> dict[str, Any]:
    """For JSON."""
    return {
        "verdict": verdict_of(steps),
        "date": today(),
        "machine": describe_machine(),
        "steps": [step.as_dict() for step in steps],
    }


def as_html(steps: Sequence[Step]) -> str:
    """The page: one table per model, then every step's details."""
    machine = describe_machine()
    parts = [
        paragraph(verdict_text(steps), "error" if verdict_of(steps) == "error" else "ok"),
        paragraph(f"{today()}, {machine['cpu']}, {machine['cores']} cores, {machine['system']}.", "note"),
    ]
    for model in dict.fromkeys(step.model for step in steps):
        own = [step for step in steps if step.model == model]
        rows = [(one.name, _MARKS[one.result.verdict], f"{one.seconds:.1f}", one.result.summary) for one in own]
        parts += [heading(model or "This machine"), table(("step", "came to", "seconds", "what"), rows, text=(0, 1, 3))]
        for step in own:
            if step.result.details:
                parts.append(paragraph(step.name, step.result.verdict))
                parts += [f"<pre>{escape(detail)}</pre>" for detail in step.result.details]
    return document("Smoke test", parts)
