"""The pattern before attention: norms of query and key, their rotation and the cache update become one kernel.

    q, k, v = split(qkv)                          rms_norm(q), rms_norm(k): where the model has them
    rotary_embedding(positions, q, k, …)   →      rotate_and_attend(q, k, v, positions, …)
    update_and_attend(q, k, v, …)

The kernel's contract is kernels/contracts/attention.h. It rotates q in the GEMM's own output, so nothing else may read
that output.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.limits import MAX_ROTATED_HEAD, ROTATED_HEAD_MULTIPLE, ROTATED_MULTIPLE
from engine.ops import rotate_and_attend, update_and_attend
from engine.steps.pattern import NotFused, Pattern, drop, example, is_item, name_of, op_of

if TYPE_CHECKING:
    from torch import fx

NORM, ROTATION = "_C.rms_norm", "_C.rotary_embedding"


@dataclass(frozen=True)
class Head:
    """Query or key before its rotation, and before its norm where it has one."""

    source: "fx.Node"
    weight: "fx.Node | None" = None
    eps: float = 0.0
    norm: "fx.Node | None" = None


def _starts_at(node: "fx.Node") -> bool:
    return node.target is update_and_attend


def _fuse(graph: "fx.Graph", attention: Any) -> None:
    """One layer: from the parts of the qkv projection to the attention that reads them."""
    query, key, value, output, layer = attention.args
    _expect_ours(layer)
    rotation = _rotation_of(query, key)
    positions, rotated_q, rotated_k, head_dim, cos_sin, halves = rotation.args
    q, k = (_head(rotated, rotation, seen) for rotated, seen in ((rotated_q, query), (rotated_k, key)))
    if (q.weight is None) != (k.weight is None) or q.eps != k.eps:
        raise NotFused("query and key are normalized in different ways")
    _expect_fits(head_dim, positions, cos_sin, query, key)
    with graph.inserting_before(attention):
        heads: Any = [
            graph.call_method("view", (head.source, -1, example(seen).shape[1], head_dim))  # type: ignore[union-attr]
            for head, seen in ((q, query), (k, key))
        ]
        rotated = (positions, cos_sin, halves, q.weight, k.weight, q.eps)
        made = graph.call_function(rotate_and_attend, (*heads, value, output, layer, *rotated))
    attention.replace_all_uses_with(made)
    drop(graph, attention, rotation, *(head.norm for head in (q, k) if head.norm is not None))


def _expect_ours(layer: str) -> None:
    from vllm.forward_context import get_forward_context

    from engine.layers.attention import Impl

    if not isinstance(get_forward_context().no_compile_layers[layer].impl, Impl):
        raise NotFused("attention is not voltserve's")


def _rotation_of(query: Any, key: Any) -> Any:
    before = query.args[0] if query.op == "call_method" and query.target == "view" else query
    rotations = [user for user in before.users if op_of(user) == ROTATION]
    known = len(rotations) == 1 and len(rotations[0].args) == 6 and not rotations[0].kwargs
    if not known or key.args[0] is not rotations[0].args[2]:
        raise NotFused("query and key are not rotated by one operation, or changed after it")
    return rotations[0]


def _head(rotated: Any, rotation: Any, seen: Any) -> Head:
    """What `rotated` was before its norm and rotation.

    Only `rotation` and `seen`, attention's view of it, may read `rotated`.
    """
    if set(rotated.users) != {rotation, seen} or len(seen.users) != 1 or seen.target != "view":
        raise NotFused("something else reads the rotated query or key")
    if is_item(rotated):  # of the split output of the GEMM
        return Head(_part(rotated))
    if name_of(rotated) != "view" or name_of(rotated.args[0]) not in ("empty", "empty_like"):
        raise NotFused("query or key comes from an unknown operation")
    made = rotated.args[0]
    norms = [user for user in made.users if op_of(user) == NORM]
    if len(norms) != 1 or set(made.users) != {norms[0], rotated} or norms[0].args[0] is not made:
        raise NotFused("query or key comes from an unknown operation")
    _, by_head, weight, eps = norms[0].args
    shape, weights = example(by_head), example(weight)
    if by_head.target != "view" or shape is None or weights is None or tuple(weights.shape) != (shape.shape[-1],):
        raise NotFused("a norm is not over single heads")
    return Head(_part(by_head.args[0], {by_head}), weight, eps, norms[0])


def _part(item: Any, readers: Any = None) -> Any:
    """`item`, after a check that it is a part of a split output that only `readers` read (None: any).

    Reading its size is allowed: recorded views do so.
    """
    source = item.args[0] if is_item(item) else None
    others = {user for user in item.users if name_of(user) != "size"}
    if source is None or name_of(source) != "split" or (readers is not None and others != readers):
        raise NotFused("query and key are not parts of one GEMM's result")
    if set(source.args[0].users) != {source} or not all(is_item(user) for user in source.users):
        raise NotFused("something else reads the GEMM's result before the rotation")
    return item


def _takes(head_dim: int, rotated: int) -> bool:
    widths_fit = head_dim % ROTATED_HEAD_MULTIPLE == 0 and rotated % ROTATED_MULTIPLE == 0
    return widths_fit and 0 < rotated <= head_dim <= MAX_ROTATED_HEAD


def _expect_fits(head_dim: int, positions: Any, cos_sin: Any, *heads: Any) -> None:
    import torch

    table, place = example(cos_sin), example(positions)
    rotated = 0 if table is None else table.shape[1]
    if not _takes(head_dim, rotated):
        raise NotFused(f"heads of {head_dim}, of which {rotated} are rotated")
    tensors = [example(node) for node in (cos_sin, *heads)]
    if any(tensor is None or tensor.dtype != torch.float16 for tensor in tensors):
        raise NotFused("query, key and angles are not all float16")
    if place is None or place.dtype != torch.int64 or place.dim() != 1:
        raise NotFused("a token has more than one position")


PATTERN = Pattern("norm of heads, rotation and cache", _starts_at, _fuse)
