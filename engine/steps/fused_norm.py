"""The pattern for the residual stream: all-reduce, addition and RMS norm become one call.

    total = all_reduce(x, group)
    fused_add_rms_norm(total, residual, weight, eps)    →    all_reduce_add_rms_norm(x, residual, weight, eps, group)

Without an all-reduce, or where something else reads its result, only addition and norm are fused. The first layer's
`rms_norm`, which adds nothing, is fused too. The call chooses the all-reduce by its size: ours, in the same kernel, or
NCCL's before it (engine/collective/communicator.py). The kernel is kernels/cuda/norm/norm.cuh.
"""

from typing import TYPE_CHECKING, Any

from engine.limits import NORM_MAX, NORM_MULTIPLE
from engine.ops import add_rms_norm, all_reduce_add_rms_norm
from engine.steps.pattern import VIEWS, NotFused, Pattern, drop, example, name_of, op_of

if TYPE_CHECKING:
    from torch import fx

ADD, PLAIN = "_C.fused_add_rms_norm", "_C.rms_norm"


def _starts_at(node: "fx.Node") -> bool:
    if op_of(node) != PLAIN:
        return op_of(node) == ADD
    like = example(node.args[1])
    return like is not None and like.dim() == 2  # a norm of heads has three dimensions


def _fuse(graph: "fx.Graph", node: Any) -> None:
    if op_of(node) == ADD:
        _fuse_add(graph, node)
    else:
        _fuse_plain(graph, node)


def _fuse_add(graph: "fx.Graph", node: Any) -> None:
    """fused_add_rms_norm(x, residual, weight, eps), which overwrites x and residual."""
    from vllm.distributed.parallel_state import all_reduce

    x, residual, weight, eps = node.args
    _expect_fits(x, weight, residual)
    chain = _behind_views(x)
    if any(user is not node and user < node for user in x.users) or any(len(one.users) > 1 for one in chain[1:]):
        raise NotFused("expected nothing else to read the sum before the norm does")
    total = chain[-1]
    summed = total.target is all_reduce and _shape(total) == _shape(x)
    source, *group = (*total.args, *total.kwargs.values()) if summed else (x,)
    function: Any = all_reduce_add_rms_norm if summed else add_rms_norm
    with graph.inserting_before(node):
        made = graph.call_function(function, (source, residual, weight, eps, *group))
    made.meta = dict(x.meta)
    x.replace_all_uses_with(made, delete_user_cb=lambda user: user is not node and user is not made)
    drop(graph, node)
    if summed:
        graph.erase_node(total)


def _fuse_plain(graph: "fx.Graph", node: Any) -> None:
    """rms_norm(out, x, weight, eps) into memory that was allocated for it."""
    out, x, weight, eps = node.args
    _expect_fits(x, weight)
    if name_of(out) not in ("empty", "empty_like"):
        raise NotFused(f"expected a result in memory of its own, got {name_of(out)}")
    with graph.inserting_before(node):
        made = graph.call_function(add_rms_norm, (x, None, weight, eps))
    made.meta = dict(out.meta)
    out.replace_all_uses_with(made, delete_user_cb=lambda user: user is not node)
    drop(graph, node)


def _behind_views(x: Any) -> list[Any]:
    """x and the nodes of which it is a view or slice, in order. The last is neither."""
    chain = [x]
    while name_of(chain[-1]) in (*VIEWS, "getitem") and example(source := chain[-1].args[0]) is not None:
        chain.append(source)
    return chain


def _shape(node: Any) -> str:
    like = example(node)
    return "" if like is None else str(list(like.shape))


def _expect_fits(*nodes: "fx.Node") -> None:
    """Raises NotFused unless the kernel takes `nodes`: x, weight and perhaps residual."""
    import torch

    known = [like for node in nodes if (like := example(node)) is not None]
    if len(known) < len(nodes) or any(like.dtype is not torch.float16 for like in known):
        raise NotFused(f"expected float16, got {', '.join(str(like.dtype) for like in known) or 'nothing known'}")
    if not all(like.is_contiguous() for like in known):
        raise NotFused("expected rows without gaps")
    x, weight, *others = known
    hidden = weight.shape[-1]
    if not isinstance(hidden, int) or hidden % NORM_MULTIPLE or hidden > NORM_MAX:
        raise NotFused(f"expected a width that is a multiple of {NORM_MULTIPLE} up to {NORM_MAX}, got {hidden}")
    if any(like.dim() != 2 or like.shape[-1] != hidden for like in (x, *others)):
        got = ", ".join(str(list(like.shape)) for like in (x, *others))
        raise NotFused(f"expected [tokens, {hidden}], got {got}")


PATTERN = Pattern("addition and norm", _starts_at, _fuse)
