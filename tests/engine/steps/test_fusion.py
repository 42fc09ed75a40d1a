"""The parts that all patterns share, and the report of a fusion. Each pattern has its own test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from torch import fx

from engine.steps import fusion, pattern
from engine.steps.pattern import Fused, Pattern

LINEAR = torch.ops.voltserve.nvfp4_linear


def product(graph: fx.Graph, x: fx.Node, packet: Any = LINEAR) -> fx.Node:
    weights = [graph.placeholder(name) for name in ("packed", "scales", "row_factor")]
    return graph.call_function(packet, (x, *weights, 16, None))


def test_what_is_dropped_takes_along_what_only_it_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    kept, gone = (graph.call_method("view", (x, size)) for size in (1, 2))
    both = graph.call_function(torch.add, (kept, gone))
    graph.output((kept,))
    pattern.drop(graph, both)
    assert [node.op for node in graph.nodes] == ["placeholder", "call_method", "output"]


def test_operators_are_known_by_name_whatever_their_overload() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    names = [pattern.op_of(product(graph, x, packet)) for packet in (LINEAR, LINEAR.default)]
    assert names == ["voltserve.nvfp4_linear"] * 2
    assert pattern.op_of(graph.call_function(torch.add, (x, x))) == pattern.op_of(x) == ""


def told(monkeypatch: Any, *results: Fused) -> Callable[[], Any]:
    made = {f"thing {index}": result for index, result in enumerate(results)}
    monkeypatch.setattr(Pattern, "apply", lambda self, _graph: made[self.what])
    return lambda: fusion.fuse(fx.Graph(), [Pattern(what, bool, lambda _graph, _node: None) for what in made])


def test_what_was_fused_and_what_was_not_is_told(monkeypatch: Any) -> None:
    choice = told(monkeypatch, Fused(2), Fused(0), Fused(1, ("layer 3 has a window", "and a cap")))()
    assert choice.choice == "thing 0 ×2, thing 2 ×1"
    assert choice.reason == "thing 2: layer 3 has a window; and a cap"
    assert told(monkeypatch, Fused(0))().choice == "none"
