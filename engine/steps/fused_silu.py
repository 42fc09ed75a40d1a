"""The gate of a feed-forward layer by our kernel, which on newer GPUs starts before the product before it has ended.

A pattern of engine/steps/fusion.py: vLLM's `silu_and_mul` into memory that was made for it. The kernel is
kernels/cuda/silu/silu_and_mul.cuh.
"""

from typing import TYPE_CHECKING, Any

from engine.steps.fusion import Fused, drop, example, name_of, op_of

if TYPE_CHECKING:
    from torch import fx

VLLM = "_C.silu_and_mul"
MULTIPLE = 16  # gate and up, each 16 bytes at a time


def fuse(graph: "fx.Graph") -> Fused:
    """Replaces every `silu_and_mul(out, x)` of fp16 activations."""
    import torch

    count, left = 0, []
    for node in list(graph.nodes):
        if op_of(node) != VLLM:
            continue
        out, x = node.args
        if reason := _unfit(out, x):
            left.append(reason)
            continue
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.voltserve.silu_and_mul, (x,))
        made.meta = dict(out.meta)
        out.replace_all_uses_with(made, delete_user_cb=lambda user, node=node: user is not node)
        drop(graph, node)
        count += 1
    return Fused(count, tuple(dict.fromkeys(left)))


def _unfit(out: Any, x: Any) -> str:
    """Why the operation stays as it is; empty if it need not."""
    import torch

    like = example(x)
    if like is None or like.dtype is not torch.float16:
        return f"expected float16, got {'nothing known' if like is None else like.dtype}"
    if not isinstance(width := like.shape[-1], int) or width % MULTIPLE:
        return f"expected a width that is a multiple of {MULTIPLE}, got {width}"
    if name_of(out) != "empty":
        return f"expected a result in memory of its own, got {name_of(out)}"
    return ""
