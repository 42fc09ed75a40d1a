"""What follows a product along the residual stream as one kernel: all-reduce, addition, RMS norm.

A pattern of engine/steps/fusion.py: vLLM's `fused_add_rms_norm`, with the all-reduce before it where nothing else
reads that one's result, and the `rms_norm` of the first layer. The kernel is kernels/cuda/norm/norm.cuh. The
call's size decides which all-reduce it is: ours in the same kernel, or NCCL's before it.
"""

from typing import TYPE_CHECKING, Any

from engine.steps.fusion import VIEWS, Fused, drop, example, name_of, op_of

if TYPE_CHECKING:
    import torch
    from torch import fx

ADD, PLAIN = "_C.fused_add_rms_norm", "_C.rms_norm"
MULTIPLE, LARGEST = 8, 16384  # of hidden (kernels/cuda/norm/args.h)


def add_rms_norm(
    x: "torch.Tensor",
    residual: "torch.Tensor | None",
    weight: "torch.Tensor",
    eps: float,
) -> "torch.Tensor":
    """The RMS norm of x [M, hidden] and of `residual`, which becomes their sum; float16."""
    import torch

    op = torch.ops.voltserve.all_reduce_rms_norm
    y: torch.Tensor = op(x, residual, weight, eps, [], [], None, 0, 0.0)
    return y


def all_reduce_add_rms_norm(
    x: "torch.Tensor",
    residual: "torch.Tensor",
    weight: "torch.Tensor",
    eps: float,
    group_name: str,
) -> "torch.Tensor":
    """As add_rms_norm, of the sum of x of the ranks of vLLM's group of that name."""
    from vllm.distributed.parallel_state import _groups

    communicator: Any = _groups[group_name]().device_communicator
    y: torch.Tensor = communicator.all_reduce_rms_norm(x, residual, weight, eps)
    return y


def fuse(graph: "fx.Graph") -> Fused:
    """Replaces what it can, in place."""
    count, left = 0, []
    for node in list(graph.nodes):
        if op_of(node) == ADD:
            reason = _fuse_add(graph, node)
        elif op_of(node) == PLAIN and (like := example(node.args[1])) is not None and like.dim() == 2:  # not of heads
            reason = _fuse_plain(graph, node)
        else:
            continue
        count += not reason
        left += [reason] if reason else []
    return Fused(count, tuple(dict.fromkeys(left)))


def _fuse_add(graph: "fx.Graph", node: Any) -> str:
    """fused_add_rms_norm(x, residual, weight, eps), which overwrites x and residual; why not, or ""."""
    from vllm.distributed.parallel_state import all_reduce

    x, residual, weight, eps = node.args
    if reason := _unfit(x, weight, residual):
        return reason
    seen_through = _seen_through(x)
    if any(user is not node and user < node for user in x.users) or any(len(one.users) > 1 for one in seen_through[1:]):
        return "expected nothing else to read the sum before the norm does"
    total = seen_through[-1]
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
    return ""


def _fuse_plain(graph: "fx.Graph", node: Any) -> str:
    """rms_norm(out, x, weight, eps) into memory that was made for it; why not, or ""."""
    out, x, weight, eps = node.args
    if reason := _unfit(x, weight):
        return reason
    if name_of(out) not in ("empty", "empty_like"):
        return f"expected a result in memory of its own, got {name_of(out)}"
    with graph.inserting_before(node):
        made = graph.call_function(add_rms_norm, (x, None, weight, eps))
    made.meta = dict(out.meta)
    out.replace_all_uses_with(made, delete_user_cb=lambda user: user is not node)
    drop(graph, node)
    return ""


def _seen_through(x: Any) -> list[Any]:
    """x, and what it is a view or a slice of, the last of which is neither."""
    chain = [x]
    while name_of(chain[-1]) in (*VIEWS, "getitem") and example(source := chain[-1].args[0]) is not None:
        chain.append(source)
    return chain


def _shape(node: Any) -> str:
    like = example(node)
    return "" if like is None else str(list(like.shape))


def _unfit(*nodes: "fx.Node") -> str:
    """Why the operation on x, weight and perhaps residual stays as it is; empty if it need not."""
    import torch

    known = [like for node in nodes if (like := example(node)) is not None]
    if len(known) < len(nodes) or any(like.dtype is not torch.float16 for like in known):
        return f"expected float16, got {', '.join(str(like.dtype) for like in known) or 'nothing known'}"
    if not all(like.is_contiguous() for like in known):
        return "expected rows without gaps"
    x, weight, *others = known
    hidden = weight.shape[-1]
    if not isinstance(hidden, int) or hidden % MULTIPLE or hidden > LARGEST:
        return f"expected a width that is a multiple of {MULTIPLE} up to {LARGEST}, got {hidden}"
    if any(like.dim() != 2 or like.shape[-1] != hidden for like in (x, *others)):
        return f"expected [tokens, {hidden}], got {', '.join(str(list(like.shape)) for like in (x, *others))}"
    return ""
