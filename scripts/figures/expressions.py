"""Reads a figure from a result file.

A cell of docs/figures.yaml is text with expressions in braces:

    {rows[gpu=v100-pcie, streams=1/8].graphs_tokens_s | .0f} tok/s

A path leads to one value or to several. `.name` enters an object; `."a name"` quotes odd names; `.*` takes all members.
`[key=value, key!=value, key^=prefix]` keeps the matching objects of a list. `/` separates alternatives. A value in
quotes is taken whole. After the path come formats:

    min max median count sum   several values to one      range          several values to the lowest and highest
    over X, minus X, times X   X is a number, or a path    weighted PATH  the mean, weighted by another path's values
    percent                    times 100, and a "%"        .1f  +.0f  ,   Python's formats

Several values are separated by " / ", a range by a dash. What is missing or ambiguous is an error.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from operator import mul, sub, truediv
from typing import Any

Json = Any
STEP = re.compile(r'\.?(?:"(?P<quoted>[^"]+)"|(?P<name>[^.\[\]"|]+)|\[(?P<filter>(?:"[^"]*"|[^\]"])*)\])')
CONDITION = re.compile(r'\s*(?P<key>[\w ]+?)(?P<operator>!=|\^=|=)(?:"(?P<quoted>[^"]*)"|(?P<values>[^,"]*))(?:,|$)')


class FigureError(Exception):
    """A cell that its result file does not answer."""


def find(document: Json, path: str) -> list[Json]:
    """The values at `path`, in the file's order."""
    nodes, at = [document], 0
    while at < len(path):
        step = STEP.match(path, at)
        if step is None:
            raise FigureError(f"{path!r}: expected a name or a filter at {path[at:]!r}")
        at = step.end()
        if step["filter"] is not None:
            nodes = [row for node in nodes for row in _matching(node, step["filter"], path)]
        elif step["name"] == "*":
            nodes = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
        else:
            nodes = [_member(node, (step["quoted"] or step["name"]).strip(), path) for node in nodes]
    if not nodes:
        raise FigureError(f"{path!r}: nothing matches")
    return nodes


def _member(node: Json, name: str, path: str) -> Json:
    if not isinstance(node, dict) or name not in node:
        got = ", ".join(node) if isinstance(node, dict) else type(node).__name__
        raise FigureError(f"{path!r}: expected {name!r}, got {got}")
    return node[name]


def _matching(node: Json, conditions: str, path: str) -> list[Json]:
    if not isinstance(node, list):
        raise FigureError(f"{path!r}: expected a list before [{conditions}]")
    rows, at = node, 0
    while at < len(conditions):
        condition = CONDITION.match(conditions, at)
        if condition is None:
            raise FigureError(f"{path!r}: expected key=value at {conditions[at:]!r}")
        at, key, quoted = condition.end(), condition["key"], condition["quoted"]
        if rows and not any(key in row for row in rows):
            raise FigureError(f"{path!r}: no row has {key!r}")
        values = [quoted] if quoted is not None else condition["values"].strip().split("/")
        rows = [row for row in rows if _holds(str(row.get(key)), condition["operator"], values)]
    return rows


def _holds(value: str, operator: str, wanted: Sequence[str]) -> bool:
    if operator == "^=":
        return value.startswith(tuple(wanted))
    return (value in wanted) == (operator == "=")


REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "median": statistics.median,
    "sum": sum,
    "count": len,
}


COMBINE: dict[str, Callable[[float, float], float]] = {"over": truediv, "minus": sub, "times": mul}


def _others(document: Json, argument: str, count: int) -> list[float]:
    """The numbers that `argument` stands for: one for all values, or one for each."""
    try:
        return [float(argument)] * count
    except ValueError:
        others = find(document, argument)
    if len(others) == 1:
        return others * count
    if len(others) != count:
        raise FigureError(f"{argument!r}: expected {count} values, got {len(others)}")
    return others


def evaluate(document: Json, expression: str) -> str:
    """The text that an expression, without its braces, stands for."""
    path, *formats = (part.strip() for part in expression.split("|"))
    values, separator = find(document, path), " / "
    for name in formats:
        word, _, argument = name.partition(" ")
        if word in REDUCE:
            values = [REDUCE[word](values)]
        elif word == "range":
            values, separator = [min(values), max(values)], "–"
        elif word == "weighted":
            weights = _others(document, argument, len(values))
            values = [sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)]
        elif word in COMBINE:
            others = _others(document, argument, len(values))
            values = [COMBINE[word](value, other) for value, other in zip(values, others, strict=True)]
        elif word == "percent":
            values = [value * 100 for value in values]
        else:
            try:
                values = [format(value, name) for value in values]
            except (TypeError, ValueError) as error:
                raise FigureError(f"{expression!r}: {error}") from error
    texts = [value if isinstance(value, str) else f"{value:g}" for value in values]
    if separator == "–" and len(set(texts)) == 1:
        return texts[0]
    return separator.join(texts) + (" %" if "percent" in formats else "")
