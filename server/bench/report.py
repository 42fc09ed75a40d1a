"""A run's results: as lines for a terminal, as JSON, and as a folder with everything."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from server.bench import page
from server.bench.measures import Distribution, Summary, summarize
from server.bench.prompts import Target
from server.bench.run import BenchSettings, LevelResult
from server.machine import command_line, describe_machine, today

# Share of one core. Above it, requests wait for the generator, and latencies include its own work.
BUSY_GENERATOR = 0.5
LATE = 0.01  # seconds; an open loop that sends later than this is another load than requested
HEADINGS = (
    "load",
    "requests",
    "failed",
    "tok/s",
    "tok/s a user",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "E2E p50",
    "p99",
)


@dataclass(frozen=True)
class Report:
    """Everything about one run but its results. `note` is the user's own line, such as what else the machine did."""

    target: Target
    settings: BenchSettings
    server: Mapping[str, Any]
    machine: Mapping[str, Any]
    date: str
    command: str
    note: str

    @classmethod
    def of(cls, target: Target, settings: BenchSettings, note: str = "") -> "Report":
        """Describes this server and this machine now. Make it before the load begins."""
        return cls(target, settings, describe_server(target), describe_machine(), today(), command_line(), note)

    def as_dict(self, results: Sequence[LevelResult]) -> dict[str, Any]:
        """For JSON; seconds, and rates per second."""
        summaries = [summarize(result) for result in results]
        return {
            "what": "load on a server: tokens per second, and what users wait for",
            "provenance": "measured",
            "date": self.date,
            "command": self.command,
            "note": self.note,
            "machine": dict(self.machine),
            "server": {"model": self.target.model, **self.server},
            "input_tokens": self.settings.input_len,
            "output_tokens": self.settings.output_len,
            "seed": self.settings.seed,
            "warnings": warnings(summaries),
            "levels": [summary.as_dict() for summary in summaries],
        }

    def write(self, out: Path, results: Sequence[LevelResult]) -> None:
        """Writes bench.json, requests.jsonl (one line per request) and index.html into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        value = self.as_dict(results)
        (out / "bench.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        rows = (json.dumps(row, ensure_ascii=False) for result in results for row in request_rows(result))
        (out / "requests.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        (out / "index.html").write_text(page.as_html(value, results), encoding="utf-8")


def describe_server(target: Target) -> dict[str, Any]:
    """The server's description of itself, where it is voltserve; empty for others."""
    try:
        version = httpx.get(f"{target.url}/version", headers=target.headers, timeout=10).json()
        health = httpx.get(f"{target.url}/health", headers=target.headers, timeout=10).json()
    except (httpx.HTTPError, ValueError):
        return {}
    known = {name: version[name] for name in ("voltserve", "vllm", "torch", "preset") if name in version}
    gpus = health.get("gpus") if isinstance(health, dict) else None
    return {**known, **({"gpus": [gpu["name"] for gpu in gpus]} if gpus else {})}


def request_rows(result: LevelResult) -> list[dict[str, Any]]:
    """One entry per request; seconds since the level began."""
    return [
        {
            "level": result.level.label,
            "due": round(one.due, 6),
            "sent": round(one.sent, 6),
            "first": round(one.events[0], 6) if one.events else None,
            "last": round(one.ended, 6),
            "pieces": len(one.events),
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "error": one.error,
        }
        for one in result.outcomes
    ]


def warnings(summaries: Sequence[Summary]) -> list[str]:
    """Reasons to doubt the figures."""
    found = []
    for one in summaries:
        if one.failed:
            found.append(f"{one.level}: {one.failed} of {one.requests} requests failed; they are in no figure")
        if one.generator_share > BUSY_GENERATOR:
            share = f"{one.generator_share:.0%}"
            found.append(
                f"{one.level}: the load generator used {share} of a core, so that its own work is in the times"
            )
        if one.late is not None and one.late.p99 > LATE:
            found.append(f"{one.level}: 1 % of the requests were sent {one.late.p99 * 1e3:.0f} ms late, or later")
    return found


def as_text(results: Sequence[LevelResult]) -> str:
    """A table, the errors and the warnings; latencies in milliseconds."""
    summaries = [summarize(result) for result in results]
    rows = [HEADINGS, *(as_row(summary) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append("tok/s: output tokens; times in milliseconds")
    for one in summaries:
        lines += [f"{one.level}: {count} × {error}" for error, count in one.errors.items()]
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings(summaries))])


def as_row(summary: Summary) -> tuple[str, ...]:
    """A level's line under HEADINGS."""
    user = "" if summary.user_tokens_per_s is None else f"{summary.user_tokens_per_s:.1f}"
    latencies = [text for one in (summary.ttft, summary.itl, summary.e2e) for text in _milliseconds(one)]
    return (
        *(summary.level, str(summary.requests), str(summary.failed), f"{summary.tokens_per_s:.1f}", user),
        *latencies,
    )


def _milliseconds(one: Distribution | None) -> tuple[str, str]:
    return ("", "") if one is None else (f"{one.p50 * 1e3:.1f}", f"{one.p99 * 1e3:.1f}")
