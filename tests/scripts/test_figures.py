"""Figures are read from result files, and what a file does not answer is an error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.figures.expressions import FigureError, evaluate
from scripts.figures.pages import Plan, Source, cell, load, marked_page, rows

DOCUMENT = {
    "floor": 4.246,
    "of": {"a.b": 0.5, "plain": 2},
    "rows": [
        {"gpu": "pcie", "streams": 1, "us": 2.0, "share": 0.5, "tokens": 63.2, "at": [8]},
        {"gpu": "pcie", "streams": 8, "us": 6.0, "share": 0.9, "tokens": 449.8, "at": [8, 9]},
        {"gpu": "sxm2, new", "streams": 1, "us": 4.0, "share": 0.7, "tokens": 1066.0, "at": []},
    ],
}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("floor | .1f", "4.2"),
        ('of."a.b" | percent | .0f', "50 %"),
        ("of.* | max", "2"),
        ("rows[gpu=pcie, streams=8].tokens | .0f", "450"),
        ("rows[gpu=pcie, streams=1/8].tokens | .0f", "63 / 450"),
        ('rows[gpu="sxm2, new"].tokens | ,', "1,066.0"),
        ("rows[gpu!=pcie].streams", "1"),
        ("rows[gpu^=sx].us", "4"),
        ('rows[at="[8, 9]"].us', "6"),
        ("rows.*.us | range | .0f", "2–6"),
        ("rows[streams=8].us | range | .0f", "6"),
        ("rows.*.us | median", "4"),
        ("rows.*.us | sum", "12"),
        ("rows.*.us | count", "3"),
        ("rows[gpu=pcie].share | weighted rows[gpu=pcie].us | percent | .0f", "80 %"),
        ("rows[gpu=pcie].tokens | over rows[gpu=pcie].us | .1f", "31.6 / 75.0"),
        ("rows[gpu=pcie].us | over floor | .2f", "0.47 / 1.41"),
        ("floor | minus 1 | times 1e3 | .0f", "3246"),
    ],
)
def test_an_expression_reads_its_figure(expression: str, text: str) -> None:
    assert evaluate(DOCUMENT, expression) == text


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("flor", "expected 'flor', got floor, of, rows"),
        ("rows[gpu=nvlink].us", "nothing matches"),
        ("rows[gpus=pcie].us", "no row has 'gpus'"),
        ("rows[gpu].us", "expected key=value"),
        ("of[plain=2]", "expected a list"),
        ("rows.*.us | over rows[gpu=pcie].us", "expected 3 values, got 2"),
        ("rows.*.gpu | .1f", "Unknown format code"),
        ("floor | sideways", "floor | sideways"),
    ],
)
def test_what_the_file_does_not_answer_is_an_error(expression: str, reason: str) -> None:
    with pytest.raises(FigureError, match=reason.replace("|", r"\|")):
        evaluate(DOCUMENT, expression)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    file = tmp_path / "results/some-2026-11-30.json"
    file.parent.mkdir()
    about = {"provenance": "measured", "device": "NVIDIA H200, torch 2.11.0", "command": "scripts/old.py F"}
    file.write_text(json.dumps({**about, **DOCUMENT}))
    table = {
        "name": "times",
        "columns": [{"en": "what", "zh": "内容"}, "floor"],
        "rows": [{"what": {"en": "a step", "zh": "一步"}, "from": "some", "cells": ["{floor | .1f} ms"]}],
    }
    return Plan({"some": Source(file)}, {"scripts/old.py": "scripts/new.py"}, [{"tables": [table]}], {})


def test_a_row_says_where_its_figures_are_from(plan: Plan, tmp_path: Path) -> None:
    assert rows(plan, plan.table("times"), tmp_path, "en")[-1] == (
        "| a step | 4.2 ms | [measured, NVIDIA H200, 2026-11-30](results/some-2026-11-30.json) |"
    )
    assert rows(plan, plan.table("times"), tmp_path / "docs", "zh")[-1] == (
        "| 一步 | 4.2 ms | [实测，NVIDIA H200，2026-11-30](../results/some-2026-11-30.json) |"
    )


def test_commands_name_files_as_they_are_called_now(plan: Plan) -> None:
    assert plan.command(plan.sources["some"]) == "scripts/new.py F"


def test_only_what_stands_between_the_markers_is_replaced(plan: Plan, tmp_path: Path) -> None:
    page = "before\n<!-- figures: times -->\nold\n<!-- /figures -->\nafter\n"
    made = marked_page(plan, tmp_path / "README.md", page, "en")
    assert made.startswith("before\n<!-- figures: times -->\n| what | floor | source |\n")
    assert made.endswith(" |\n<!-- /figures -->\nafter\n")
    assert marked_page(plan, tmp_path / "README.md", made, "en") == made


def test_a_page_without_markers_or_with_an_unknown_table_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FigureError, match="has no <!-- figures"):
        marked_page(plan, tmp_path / "README.md", "text", "en")
    with pytest.raises(FigureError, match="no table 'other'"):
        marked_page(plan, tmp_path / "README.md", "<!-- figures: other -->\n<!-- /figures -->", "en")


def test_a_cell_may_read_another_of_its_row_s_files(plan: Plan) -> None:
    assert cell(plan, ["other", "some"], "{some: floor | .0f}") == "4"


def test_a_file_that_names_no_machine_or_provenance_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "some-2026-11-30.json"
    file.write_text(json.dumps({"provenance": "guessed"}))
    with pytest.raises(FigureError, match="names no machine"):
        _ = Source(file).machine
    with pytest.raises(FigureError, match="got 'guessed'"):
        _ = Source(file).provenance
    assert Source(file, says={"machine": "V100"}).machine == "V100"


def test_every_recorded_command_starts_a_file_that_exists() -> None:
    root = Path(__file__).parents[2]
    plan = load()
    commands = " ".join(plan.command(source) for source in plan.sources.values())
    named = set(re.findall(r"\b(?:scripts|kernels|perfmodel)/[\w/]+\.(?:py|sh)\b", commands))
    assert named
    assert [name for name in sorted(named) if not (root / name).exists()] == []
