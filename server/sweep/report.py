"""A whole sweep: from its settings to sweep.jsonl, the page and the preset."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.progress import OnProgress
from server.bench.run import BenchSettings
from server.config.presets import find_preset, load_presets
from server.config.settings import Config
from server.machine import command_line, describe_machine, today
from server.sweep import page
from server.sweep.choose import Candidate, as_preset, candidates, pareto, winner, write_preset
from server.sweep.grid import Point, parse_axes, points
from server.sweep.run import Sweep
from server.sweep.store import FILE, Store


@dataclass(frozen=True)
class Sweeping:
    """A sweep at work; made by `of`."""

    config: Config
    sweep: Sweep
    points: tuple[Point, ...]
    store: Store
    machine: dict[str, Any]
    note: str

    @classmethod
    def of(
        cls,
        arguments: tuple[str, ...],
        config: Config,
        varied: tuple[str, ...],
        settings: BenchSettings,
        out: Path,
        note: str = "",
        module: str = "server",
    ) -> "Sweeping":
        """Reads what is in `out` already.

        Raises:
            ConfigError: nothing that can be varied, or `out` holds another sweep.
        """
        grid = points(parse_axes(varied, config))
        machine = describe_machine()
        conditions = {
            "arguments": list(arguments),
            "preset": config.preset,
            "load": [level.label for level in settings.levels],
            "tokens": [settings.input_len, settings.output_len],
            "requests": settings.requests,
            "machine": [machine["cpu"], machine["cores"], *(str(gpu) for gpu in config.devices.gpus)],
        }
        return cls(config, Sweep(arguments, settings, out, module), grid, Store(out, conditions), machine, note)

    def run(self, on_progress: OnProgress) -> None:
        """Measures what is not measured yet."""
        self.sweep.run(self.points, self.store, on_progress)

    def conclude(self, least_user: float) -> tuple[str, bool]:
        """Writes index.html and, where a point is good enough, the preset; returns lines for people, and whether."""
        records = list(self.store.records.values())
        found = candidates(records)
        best = winner(found, least_user)
        about = {
            "model": self.config.model,
            "machine": self.machine,
            "date": today(),
            "command": command_line(),
            "note": self.note,
        }
        html = self.sweep.out / "index.html"
        html.write_text(page.as_html(about, records, best), encoding="utf-8")
        counts = Counter(record.status for record in records)
        lines = [", ".join(f"{count} points {status}" for status, count in sorted(counts.items()))]
        lines += [f"{record.status}: {_name(record.point)}: {record.reason}" for record in records if record.reason]
        lines += ["no other point beats both figures of:", *(f"  {one}" for one in pareto(found))] if found else []
        if best is None:
            wanted = f"with {least_user:g} tokens per second and user" if least_user else "at all"
            lines.append(f"no point was measured {wanted}; {html}")
            return "\n".join(lines), False
        preset = self._write_preset(best)
        lines += [
            f"best: {best}",
            f"serve it so: voltserve serve --model {self.config.model} --preset {preset}",
            str(html),
        ]
        return "\n".join(lines), True

    def _write_preset(self, best: Candidate) -> Path:
        base = find_preset(self.config.preset, load_presets())
        load = f"{self.sweep.settings.input_len} + {self.sweep.settings.output_len} tokens"
        measured = (
            f"voltserve sweep, {today()}, {self.config.model}: {best.total:.1f} tok/s at {best.level}, {load} ({FILE})"
        )
        about = f"Written by `{command_line()}`."
        return write_preset(self.sweep.out, as_preset(base, self.config, best, measured), about)


def _name(point: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in point.items())
