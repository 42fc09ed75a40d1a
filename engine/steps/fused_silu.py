"""The pattern for a feed-forward layer's gate: vLLM's `silu_and_mul` becomes ours.

    out = empty(…)
    silu_and_mul(out, x)         →      silu_and_mul(x)

On GPUs newer than a V100 our kernel is a programmatic dependent launch: it starts before the GEMM before it has ended.
The kernel is kernels/cuda/silu/silu_and_mul.cuh.
"""

from typing import TYPE_CHECKING, Any

from engine.limits import SILU_MULTIPLE
from engine.steps.pattern import NotFused, Pattern, drop, example, name_of, op_of

if TYPE_CHECKING:
    from torch import fx

VLLM = "_C.silu_and_mul"


def _starts_at(node: "fx.Node") -> bool:
    return op_of(node) == VLLM


def _fuse(graph: "fx.Graph", node: Any) -> None:
    """silu_and_mul(out, x) on float16 activations."""
    import torch

    out, x = node.args
    _expect_fits(out, x)
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.voltserve.silu_and_mul, (x,))
    made.meta = dict(out.meta)
    out.replace_all_uses_with(made, delete_user_cb=lambda user: user is not node)
    drop(graph, node)


def _expect_fits(out: Any, x: Any) -> None:
    import torch

    like = example(x)
    if like is None or like.dtype is not torch.float16:
        raise NotFused(f"expected float16, got {'nothing known' if like is None else like.dtype}")
    if not isinstance(width := like.shape[-1], int) or width % SILU_MULTIPLE:
        raise NotFused(f"expected a width that is a multiple of {SILU_MULTIPLE}, got {width}")
    if name_of(out) != "empty":
        raise NotFused(f"expected a result in memory of its own, got {name_of(out)}")


PATTERN = Pattern("SiLU and multiplication", _starts_at, _fuse)
