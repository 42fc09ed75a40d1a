"""What a pattern is: how to add a fused operation to recorded steps, and what patterns share.

A pattern finds one sequence of operations in a recorded step and replaces it by one call:

    vLLM's operations in the graph                 a pattern                      what the step calls instead
    silu_and_mul(out, x)                           steps/fused_silu.py            torch.ops.voltserve.silu_and_mul(x)
    all_reduce → fused_add_rms_norm                steps/fused_norm.py            ops.all_reduce_add_rms_norm
    rms_norm, rotary_embedding → attention         steps/fused_rotation.py        ops.rotate_and_attend

It is a module of its own with a `PATTERN`, which has two functions:

- `starts_at(node)`: whether a sequence may be fused at this node. It is asked for every node.
- `fuse(graph, node)`: rewrites the graph in place, or raises `NotFused` with the reason and changes nothing.

To add one: write the module, list its `PATTERN` in steps/fusion.py, and add a test beside the others. What the step
calls is an operator of torch.ops.voltserve, or a function of engine/ops.py where vLLM's state is needed.

The graph is the one that `recording.direct` leaves. Its operators are overloads or their packets
(`torch.ops._C.rms_norm`). Attention and all-reduces are functions of Python. A node's `meta["example_value"]` is a
tensor without numbers.
"""

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import fx

VIEWS = ("view", "reshape", "contiguous")
# Nodes without side effects: they can be erased once nothing reads them.
PURE = {*VIEWS, "size", "split", "chunk", "getitem", "empty", "empty_like", "Size", "shape"}


class NotFused(Exception):
    """Why a sequence stays as it is."""


@dataclass(frozen=True)
class Fused:
    """The result of a pattern: how many sequences are fused, and why others are not."""

    count: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """A sequence of operations and its replacement; `what` names it for people."""

    what: str
    starts_at: "Callable[[fx.Node], bool]"
    fuse: "Callable[[fx.Graph, Any], None]"

    def apply(self, graph: "fx.Graph") -> Fused:
        """Fuses every sequence of `graph` that it can."""
        count, left = 0, Counter[str]()
        for node in [node for node in graph.nodes if self.starts_at(node)]:
            try:
                self.fuse(graph, node)
            except NotFused as reason:
                left[str(reason)] += 1
            else:
                count += 1
        return Fused(count, tuple(f"{reason} (×{times})" if times > 1 else reason for reason, times in left.items()))


def op_of(node: Any) -> str:
    """The operator that a node calls, as "namespace.name" without its overload; "" if it calls none."""
    packet = getattr(getattr(node, "target", None), "overloadpacket", getattr(node, "target", None))
    name = getattr(packet, "_qualified_op_name", "")  # torch's
    return str(name).replace("::", ".")


def name_of(node: "fx.Node") -> str:
    """The name of the method or function that a node calls, or ""."""
    if not node.op.startswith("call"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def example(node: Any) -> "torch.Tensor | None":
    """A tensor without numbers that is like the node's value. Its first dimension may be symbolic."""
    value = getattr(node, "meta", {}).get("example_value")
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else None


def is_item(node: "fx.Node") -> bool:
    """Whether the node takes one of several values."""
    return node.target is operator.getitem


def drop(graph: "fx.Graph", *nodes: "fx.Node") -> None:
    """Erases nodes without users. Then erases the views, sizes and memory that only those nodes read."""
    for node in nodes:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            if not source.users and not source._erased and name_of(source) in PURE:
                drop(graph, source)
