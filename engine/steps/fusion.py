"""Neighbouring small operations of a recorded step, made one kernel each.

Between a decoding step's GEMMs lie operations that read next to nothing. Each is a launch during which the memory bus
is idle. A recorded step (engine/steps/recording.py) is searched for sequences that `voltserve_kernels` has as one
kernel, and they are replaced. A sequence that differs in anything stays as it is, and the decision says why.

A pattern is a function of a file of its own, named in PATTERNS. It is given the graph that `recording.direct` made:
operators of PyTorch as their packets (`torch.ops._C.rms_norm`), attention and all-reduces as functions of Python.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.volta import Choice

if TYPE_CHECKING:
    import torch
    from torch import fx

WHAT = "fused operations of a step"
WITHOUT_KERNELS = Choice(WHAT, "none", "voltserve_kernels is not installed, or was built without code for GPUs")
VIEWS = ("view", "reshape", "contiguous")
# Nodes that change nothing: they can go when nobody reads them.
PURE = {*VIEWS, "size", "split", "chunk", "getitem", "empty", "empty_like", "Size", "shape"}


@dataclass(frozen=True)
class Fused:
    """What became of a pattern's places in a graph: how many are fused, and why others are not."""

    count: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """What it makes one of, for people, and the function that does: "module.function", imported when it is used."""

    what: str
    path: str

    def apply(self, graph: "fx.Graph") -> Fused:
        """Rewrites `graph`."""
        module, _, name = self.path.rpartition(".")
        function: Callable[[fx.Graph], Fused] = getattr(import_module(module), name)
        return function(graph)


# In this order: what ends with an all-reduce comes last.
PATTERNS: tuple[Pattern, ...] = (
    Pattern("norm of heads, rotation and cache", "engine.steps.fused_rotation.fuse"),
    Pattern("silu and product", "engine.steps.fused_silu.fuse"),
    Pattern("addition and norm", "engine.steps.fused_norm.fuse"),
)


def fuse(graph: "fx.Graph", patterns: Sequence[Pattern] | None = None) -> Choice:
    """Applies every pattern to `graph`, and says what it did."""
    done = [(pattern.what, pattern.apply(graph)) for pattern in (PATTERNS if patterns is None else patterns)]
    graph.lint()
    fused = [f"{what} ×{result.count}" for what, result in done if result.count]
    left = [f"{what}: {'; '.join(result.left)}" for what, result in done if result.left]
    return Choice(WHAT, ", ".join(fused) or "none", "; ".join(left) or "one kernel does what several did")


def op_of(node: Any) -> str:
    """The operator that a node calls, as "namespace.name", whatever its overload; "" if it calls none."""
    packet = getattr(getattr(node, "target", None), "overloadpacket", getattr(node, "target", None))
    name = getattr(packet, "_qualified_op_name", "")  # torch's
    return str(name).replace("::", ".")


def name_of(node: "fx.Node") -> str:
    """The method's or function's name that a node calls, or ""."""
    if not node.op.startswith("call"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def example(node: Any) -> "torch.Tensor | None":
    """A tensor without numbers that is like the node's value; its first dimension may be symbolic."""
    value = getattr(node, "meta", {}).get("example_value")
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else None


def is_item(node: "fx.Node") -> bool:
    """Whether the node takes one of several values."""
    return node.target is operator.getitem


def drop(graph: "fx.Graph", *nodes: "fx.Node") -> None:
    """Erases nodes without users, and then what only they read of views, sizes and memory."""
    for node in nodes:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            if not source.users and not source._erased and name_of(source) in PURE:
                drop(graph, source)
