"""From docs/figures.yaml and the result files to Markdown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from scripts.figures.expressions import FigureError, Json, evaluate, find

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "docs/figures.yaml"
PAGE = ROOT / "docs/figures.md"
NOTICE = "<!-- Made by `python -m scripts.figures` from docs/figures.yaml and docs/results/. Edit those. -->"
MARKED = re.compile(r"(<!-- figures: (?P<table>[\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
WORDS = {
    "en": {"measured": "measured", "computed": "computed", "reported": "reported by others", "source": "source"},
    "zh": {"measured": "实测", "computed": "计算值", "reported": "他人报告", "source": "来源"},
}

Text = str | Mapping[str, str]


def in_language(text: Text, language: str) -> str:
    """A text of the plan: one for all languages, or one for each."""
    return text if isinstance(text, str) else text[language]


@dataclass(frozen=True)
class Source:
    """One result file. What it says of itself can be completed in the plan, where it does not."""

    path: Path
    at: str = ""
    says: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def document(self) -> Json:
        """The file's content."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    @cached_property
    def about(self) -> Mapping[str, Json]:
        """The object that holds provenance, machine, date and command."""
        at = find(self.document, self.at)[0] if self.at else self.document
        return {**at, **self.says}

    @property
    def provenance(self) -> str:
        """Measured, computed, or reported by others."""
        word = str(self.about.get("provenance", self.about.get("kind", ""))).split(";")[0]
        if word not in WORDS["en"]:
            raise FigureError(f"{self.path.name}: provenance: expected measured, computed or reported, got {word!r}")
        return word

    @property
    def machine(self) -> str:
        """Where it was measured; for which GPU it was computed."""
        machine = self.about.get("machine") or self.about.get("device") or self.about.get("gpu")
        if isinstance(machine, dict):
            machine = machine.get("name") or f"{machine['cores']} cores, {machine['cpu']}"
        if not machine:
            raise FigureError(f"{self.path.name}: it names no machine; write one in docs/figures.yaml")
        return re.split(r"[;(]|, torch", str(machine))[0].strip()

    @property
    def date(self) -> str:
        """The file's date, or the one in its name."""
        named = re.search(r"\d{4}-\d\d-\d\d", self.path.name)
        date = self.about.get("date") or (named and named[0])
        if not date:
            raise FigureError(f"{self.path.name}: no date")
        return str(date)


@dataclass(frozen=True)
class Plan:
    """docs/figures.yaml: result files by short name, and sections of tables."""

    sources: Mapping[str, Source]
    moved: Mapping[str, str]
    sections: Sequence[Mapping[str, Any]]
    pages: Mapping[str, str]

    def table(self, name: str) -> Mapping[str, Any]:
        """The table of that name."""
        tables: dict[str, Mapping[str, Any]] = {
            table["name"]: table for section in self.sections for table in section["tables"]
        }
        if name not in tables:
            raise FigureError(f"no table {name!r} in docs/figures.yaml; there are {', '.join(tables)}")
        return tables[name]

    def command(self, source: Source) -> str:
        """The command that the file records, with the present names of files that have moved since."""
        command = str(source.about["command"])
        for old, new in self.moved.items():
            command = command.replace(old, new)
        return command


def load(path: Path = PLAN) -> Plan:
    """Reads the plan."""
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    folder = path.parent / "results"
    sources = {
        name: Source(folder / entry) if isinstance(entry, str) else _source(folder, **entry)
        for name, entry in raw["sources"].items()
    }
    return Plan(sources, raw["moved"], raw["sections"], raw["pages"])


def _source(folder: Path, file: str, at: str = "", **says: str) -> Source:
    return Source(folder / file, at, says)


def cell(plan: Plan, names: Sequence[str], text: str) -> str:
    """A cell's text, its expressions replaced. `{name: …}` reads another of the row's files than the first."""

    def value(match: re.Match[str]) -> str:
        prefix, colon, rest = match[1].partition(": ")
        name, expression = (prefix, rest) if colon and prefix in names else (names[0], match[1])
        return evaluate(plan.sources[name].document, expression)

    return re.sub(r"\{([^}]*)\}", value, text)


def rows(plan: Plan, table: Mapping[str, Any], folder: Path, language: str) -> list[str]:
    """The table as Markdown, for a page in `folder`."""
    columns = [in_language(column, language) for column in table["columns"]] + [WORDS[language]["source"]]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in table["rows"]:
        if unknown := set(row) - {"what", "cells", "from", "provenance"}:
            raise FigureError(f"{row['what']!r}: unknown keys: {', '.join(map(str, unknown))}")
        names = _names(row, table)
        cells = [in_language(row["what"], language), *(cell(plan, names, str(text)) for text in row["cells"])]
        if len(cells) != len(columns) - 1:
            raise FigureError(f"{cells[0]!r}: expected {len(columns) - 1} cells, got {len(cells)}")
        cells.append("; ".join(_link(plan.sources[name], row, folder, language) for name in names))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _names(row: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    names = row.get("from", table.get("from"))
    return [names] if isinstance(names, str) else list(names)


def _link(source: Source, row: Mapping[str, Any], folder: Path, language: str) -> str:
    provenance = WORDS[language][row.get("provenance", source.provenance)]
    comma = ", " if language == "en" else "，"
    path = Path(os.path.relpath(source.path, folder)).as_posix()
    return f"[{provenance}{comma}{source.machine}{comma}{source.date}]({path})"


def whole_page(plan: Plan, page: Path = PAGE) -> str:
    """docs/figures.md: every table, and under each the commands that its files record."""
    lines = [NOTICE, "", "# Figures", ""]
    lines += [
        "`python -m scripts.figures` reads every figure from a result file; [figures.yaml](figures.yaml) says where.",
        "`python -m scripts.figures --check` fails where a page is stale.",
        "*Measured* figures were seen on the machine named. *Computed* ones follow from machine code and stated costs.",
        "Commands are those that the result files record, with today's names of files that have moved.",
    ]
    for section in plan.sections:
        lines += ["", f"## {section['title']}"]
        for table in section["tables"]:
            lines += ["", f"### {in_language(table['title'], 'en')}", ""]
            if "text" in table:
                lines += [in_language(table["text"], "en").strip(), ""]
            lines += [*rows(plan, table, page.parent, "en"), ""]
            used = dict.fromkeys(name for row in table["rows"] for name in _names(row, table))
            for source in (plan.sources[name] for name in used):
                path = Path(os.path.relpath(source.path, page.parent)).as_posix()
                lines.append(f"- [{source.path.name}]({path}): `{plan.command(source)}`")
    return "\n".join(lines) + "\n"


def marked_page(plan: Plan, page: Path, text: str, language: str) -> str:
    """A page with the tables between its markers made anew."""

    def fill(match: re.Match[str]) -> str:
        table = plan.table(match["table"])
        return match[1] + "\n".join(rows(plan, table, page.parent, language)) + "\n" + match[3]

    filled, count = MARKED.subn(fill, text)
    if count == 0:
        raise FigureError(f"{page}: it has no <!-- figures: TABLE --> … <!-- /figures -->")
    return filled


def pages(plan: Plan, root: Path = ROOT) -> dict[Path, str]:
    """Every page that holds figures, as it should be."""
    wanted = {root / "docs/figures.md": whole_page(plan, root / "docs/figures.md")}
    for name, language in plan.pages.items():
        page = root / name
        wanted[page] = marked_page(plan, page, page.read_text(encoding="utf-8"), language)
    return wanted
