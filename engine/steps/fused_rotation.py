"""Norms of query and key, their rotation and the update of the cache as one kernel, before attention.

    q, k, v = split(qkv)                          rms_norm(q), rms_norm(k): where the model has them
    rotary_embedding(positions, q, k, …)   →      rotate_and_attend(q, k, v, positions, …)
    update_and_attend(q, k, v, …)

The contract of the op: kernels/contracts/attention.h. q is rotated where the product left it, so nothing else may read
it.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.steps.fusion import Fused, drop, example, is_item, name_of, op_of

if TYPE_CHECKING:
    import torch
    from torch import fx

NORM, ROTATION = "_C.rms_norm", "_C.rotary_embedding"
MAX_HEAD = 256


class NotFused(Exception):
    """Why a layer stays as it is."""


@dataclass(frozen=True)
class Head:
    """Query or key before its norm, if it has one, and rotation."""

    source: "fx.Node"
    weight: "fx.Node | None" = None
    eps: float = 0.0
    norm: "fx.Node | None" = None


def fuse(graph: "fx.Graph") -> Fused:
    """Rewrites every layer of `graph` whose attention is ours."""
    from engine.steps.recording import update_and_attend

    left: Counter[str] = Counter()
    attentions = [node for node in graph.nodes if node.target is update_and_attend]
    for attention in attentions:
        try:
            _fuse_layer(graph, attention)
        except NotFused as reason:
            left[str(reason)] += 1
    reasons = tuple(f"{reason} (×{count})" for reason, count in left.items())
    return Fused(len(attentions) - left.total(), reasons)


def _fuse_layer(graph: "fx.Graph", attention: Any) -> None:
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
    """What `rotated` was before, given that only `rotation` and attention's view `seen` of it read it."""
    if set(rotated.users) != {rotation, seen} or len(seen.users) != 1 or seen.target != "view":
        raise NotFused("something else reads the rotated query or key")
    if is_item(rotated):  # of the product's split result
        return Head(_part(rotated))
    if name_of(rotated) != "view" or name_of(rotated.args[0]) != "empty_like":
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
    """`item` of a split of which nothing else is written to or overlaps it.

    Sizes of it are read, too, to undo views.
    """
    source = item.args[0] if is_item(item) else None
    others = {user for user in item.users if name_of(user) != "size"}
    if source is None or name_of(source) != "split" or (readers is not None and others != readers):
        raise NotFused("query and key are not parts of one product")
    if set(source.args[0].users) != {source} or not all(is_item(user) for user in source.users):
        raise NotFused("something else reads the product before the rotation")
    return item


def _expect_fits(head_dim: int, positions: Any, cos_sin: Any, *heads: Any) -> None:
    import torch

    table, place = example(cos_sin), example(positions)
    rotated = 0 if table is None else table.shape[1]
    if head_dim > MAX_HEAD or head_dim % 8 or rotated % 4 or not 0 < rotated <= head_dim:
        raise NotFused(f"heads of {head_dim}, of which {rotated} are rotated")
    tensors = [example(node) for node in (cos_sin, *heads)]
    if any(tensor is None or tensor.dtype != torch.float16 for tensor in tensors):
        raise NotFused("query, key and angles are not all float16")
    if place is None or place.dtype != torch.int64 or place.dim() != 1:
        raise NotFused("a token has more than one position")


def rotate_and_attend(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    output: "torch.Tensor",
    layer_name: str,
    positions: "torch.Tensor",
    cos_sin: "torch.Tensor",
    halves: bool,
    q_weight: "torch.Tensor | None",
    k_weight: "torch.Tensor | None",
    eps: float,
) -> None:
    """The layer's attention of `query` [T, H, D], `key` and `value` [T, H_kv, D], of which query and key are as their
    product left them, into `output` [T, H, D].
    """
    import torch
    from vllm.model_executor.layers.attention.attention import get_attention_context

    metadata, layer, cache, slots = get_attention_context(layer_name)
    if metadata is not None:  # None: vLLM measures the memory of a step that has no requests
        keys, values = layer.impl.halves(cache)
        torch.ops.voltserve.rotate_and_cache(
            query, key, value, positions, cos_sin, halves, q_weight, k_weight, eps, keys, values, slots
        )
    layer.impl.forward(layer, query, key, value, cache, metadata, output=output)
