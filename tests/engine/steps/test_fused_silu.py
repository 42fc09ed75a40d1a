"""The gate's pattern: what it replaces, with what, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from torch import fx

from engine.steps import fused_silu, pattern

OPS: Any = torch.ops


def vllm_gate(out: torch.Tensor, x: torch.Tensor) -> None:
    """Stands for vLLM's operator, which only its compiled kernels define."""


vllm_gate._qualified_op_name = "_C::silu_and_mul"  # type: ignore[attr-defined]


def gate(x: Any, made: Any = torch.empty) -> fx.Graph:
    """vLLM's recorded operations, `x` as an example, and the GEMM that reads their result."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    if x is not None:
        node.meta["example_value"] = x
    weights = [graph.placeholder(name) for name in ("packed", "scales", "row_factor")]
    out = graph.call_function(made, ((2, 32),), {"dtype": torch.float16})
    graph.call_function(vllm_gate, (out, node))
    graph.output(
        (graph.call_function(OPS.voltserve.nvfp4_linear, (graph.call_method("view", (out, -1, 32)), *weights, 16)),)
    )
    return graph


def called(graph: fx.Graph) -> list[str]:
    return [pattern.op_of(node) or pattern.name_of(node) for node in graph.nodes if node.op.startswith("call")]


def test_the_gate_becomes_one_operation() -> None:
    graph = gate(torch.empty(2, 64, dtype=torch.float16))
    assert fused_silu.PATTERN.apply(graph) == pattern.Fused(1)
    graph.lint()
    assert called(graph) == ["voltserve.silu_and_mul", "view", "voltserve.nvfp4_linear"]


@pytest.mark.parametrize(
    ("x", "made", "reason"),
    [
        (torch.empty(2, 64, dtype=torch.bfloat16), torch.empty, "expected float16, got torch.bfloat16"),
        (None, torch.empty, "expected float16, got nothing known"),
        (torch.empty(2, 72, dtype=torch.float16), torch.empty, "expected a width that is a multiple of 16, got 72"),
        (torch.empty(2, 64, dtype=torch.float16), torch.ones, "expected a result in memory of its own, got ones"),
    ],
)
def test_other_gates_are_left_and_told(x: torch.Tensor | None, made: Any, reason: str) -> None:
    graph = gate(x, made)
    before = called(graph)
    assert fused_silu.PATTERN.apply(graph) == pattern.Fused(0, (reason,))
    assert called(graph) == before


def test_the_operation_is_told_what_vllm_computes() -> None:
    """On tensors without numbers: the shapes and types of vLLM's."""
    with torch.device("meta"):
        x = torch.empty(3, 5, 64, dtype=torch.float16)
        made = OPS.voltserve.silu_and_mul(x)
    assert (made.shape, made.dtype) == ((3, 5, 32), torch.float16)
