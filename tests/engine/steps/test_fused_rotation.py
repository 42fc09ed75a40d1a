"""The rotation's pattern: what it replaces, with what, and what it leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.attention  # noqa: F401 - before its module `attention`
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from torch import fx
from vllm import forward_context
from vllm.model_executor.layers.attention import attention as vllm_attention

from engine.layers import attention
from engine.ops import rotate_and_attend, update_and_attend
from engine.steps import fused_rotation, pattern
from engine.steps.pattern import Fused

fuse = fused_rotation.PATTERN.apply

TOKENS, HEADS, KV_HEADS, HEAD_DIM, LAYER = 4, 6, 2, 64, "layers.0"
WIDTHS = [count * HEAD_DIM for count in (HEADS, KV_HEADS, KV_HEADS)]
EPS = 1e-6


def rms_norm(out: Any, x: Any, weight: Any, eps: Any) -> None:
    """Stands for vLLM's operator, which only its compiled kernels define; so does the next one."""


def rotary_embedding(positions: Any, query: Any, key: Any, head_size: Any, cos_sin: Any, halves: Any) -> None:
    """See above."""


rms_norm._qualified_op_name = fused_rotation.NORM.replace(".", "::")  # type: ignore[attr-defined]
rotary_embedding._qualified_op_name = fused_rotation.ROTATION.replace(".", "::")  # type: ignore[attr-defined]


class Layer:
    """One layer's operations from one GEMM to the next, as `recording.direct` leaves them."""

    def __init__(self, *, norms: bool, rotated: int = HEAD_DIM, positions: tuple[int, ...] = (TOKENS,)) -> None:
        self.graph = graph = fx.Graph()
        product = graph.placeholder("qkv")
        self.split = graph.call_method("split", (product, WIDTHS), {"dim": -1})
        parts = [graph.call_function(operator.getitem, (self.split, index)) for index in range(3)]
        self.positions = self.input("positions", torch.empty(positions, dtype=torch.int64))
        self.cos_sin = self.input("cos_sin", torch.empty(9, rotated, dtype=torch.float16))
        self.weights = [self.input(name, torch.empty(HEAD_DIM)) for name in ("q_weight", "k_weight")]
        flat = [
            self.norm(*each) if norms else each[0] for each in zip(parts, (HEADS, KV_HEADS), self.weights, strict=False)
        ]
        self.rotation = graph.call_function(rotary_embedding, (self.positions, *flat, HEAD_DIM, self.cos_sin, True))
        self.heads = [self.by_head(*each) for each in zip((*flat, parts[2]), (HEADS, KV_HEADS, KV_HEADS), strict=True)]
        empty = graph.call_function(torch.empty, ((TOKENS, WIDTHS[0]),))
        self.output = graph.call_method("view", (empty, -1, HEADS, HEAD_DIM))
        graph.call_function(update_and_attend, (*self.heads, self.output, LAYER))
        graph.output((graph.call_method("view", (self.output, -1, WIDTHS[0])),))

    def input(self, name: str, like: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = like
        return node

    def by_head(self, node: fx.Node, heads: int) -> fx.Node:
        view = self.graph.call_method("view", (node, -1, heads, HEAD_DIM))
        view.meta["example_value"] = torch.empty(TOKENS, heads, HEAD_DIM, dtype=torch.float16)
        return view

    def norm(self, part: fx.Node, heads: int, weight: fx.Node) -> fx.Node:
        x = self.by_head(part, heads)
        out = self.graph.call_function(torch.empty_like, (x,))
        self.graph.call_function(rms_norm, (out, x, weight, EPS))
        return self.graph.call_method("view", (out, self.graph.call_method("size", (part,))))

    def after(self, node: fx.Node, *arguments: Any) -> None:
        """Something else that reads `arguments`, after `node`."""
        with self.graph.inserting_after(node):
            self.graph.call_function(torch.add, arguments)


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's layers by name: one layer with our attention."""
    ours = attention.Impl(HEADS, HEAD_DIM, 1.0, KV_HEADS)
    known: dict[str, Any] = {LAYER: SimpleNamespace(impl=ours)}
    context = SimpleNamespace(no_compile_layers=known)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    return known


def called(graph: fx.Graph) -> list[str]:
    return [pattern.op_of(node) or pattern.name_of(node) for node in graph.nodes if node.op.startswith("call")]


def behind_views(node: fx.Node) -> fx.Node:
    while pattern.name_of(node) in pattern.VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


@pytest.mark.parametrize("norms", [False, True])
def test_all_between_the_product_and_attention_becomes_one_call(norms: bool) -> None:
    layer = Layer(norms=norms)
    assert fuse(layer.graph) == Fused(1)
    layer.graph.lint()
    made = next(node for node in layer.graph.nodes if node.target is rotate_and_attend)
    assert [behind_views(head).args for head in made.args[:2]] == [(layer.split, 0), (layer.split, 1)]
    weights = layer.weights if norms else [None, None]
    assert made.args[5:] == (
        layer.positions,
        layer.cos_sin,
        True,
        *weights,
        EPS if norms else 0.0,
    )
    views = ["view"] * 4  # of query, key, value and the output
    assert sorted(called(layer.graph)) == sorted(
        [*["getitem"] * 3, "split", *views, "empty", "view", "rotate_and_attend"]
    )


def other_reader(layer: Layer) -> None:
    layer.after(layer.rotation, layer.rotation.args[1], 1)


def changed_after(layer: Layer) -> None:
    layer.after(layer.heads[0], layer.heads[0], 1)


def result_is_kept(layer: Layer) -> None:
    layer.after(layer.split, layer.split.args[0], 1)


def one_norm(layer: Layer) -> None:
    norm = next(node for node in layer.graph.nodes if node.target is rms_norm)
    norm.args = (*norm.args[:3], 2 * EPS)


def wide_norm(layer: Layer) -> None:
    layer.weights[0].meta["example_value"] = torch.empty(WIDTHS[0])


def in_float32(layer: Layer) -> None:
    layer.cos_sin.meta["example_value"] = torch.empty(9, HEAD_DIM)


@pytest.mark.parametrize(
    ("change", "norms", "reason"),
    [
        (other_reader, True, "something else reads the rotated"),
        (other_reader, False, "something else reads the rotated"),
        (changed_after, True, "something else reads the rotated"),
        (result_is_kept, False, "something else reads the GEMM's result"),
        (one_norm, True, "in different ways"),
        (wide_norm, True, "not over single heads"),
        (in_float32, True, "not all float16"),
    ],
)
def test_what_is_not_as_expected_is_left(change: Callable[[Layer], None], norms: bool, reason: str) -> None:
    layer = Layer(norms=norms)
    change(layer)
    before = called(layer.graph)
    found = fuse(layer.graph)
    assert found.count == 0
    assert reason in found.left[0]
    assert called(layer.graph) == before


def test_heads_and_positions_that_the_kernel_does_not_take_are_left() -> None:
    assert "of which 6 are rotated" in fuse(Layer(norms=True, rotated=6).graph).left[0]
    assert "more than one position" in fuse(Layer(norms=True, positions=(3, TOKENS)).graph).left[0]


def test_attention_of_another_backend_is_left(layers: dict[str, Any]) -> None:
    layers[LAYER] = SimpleNamespace(impl=object())
    assert "not voltserve's" in fuse(Layer(norms=True).graph).left[0]


@pytest.mark.parametrize("requests", [False, True])
def test_the_cache_is_written_before_it_is_read(monkeypatch: pytest.MonkeyPatch, requests: bool) -> None:
    calls: list[Any] = []
    impl = SimpleNamespace(
        halves=lambda cache: (f"{cache} k", f"{cache} v"),
        forward=lambda _layer, *inputs, output: calls.append(("attend", *inputs, output)),
    )
    metadata = "metadata" if requests else None
    monkeypatch.setattr(
        vllm_attention, "get_attention_context", lambda _name: (metadata, SimpleNamespace(impl=impl), "cache", "slots")
    )
    monkeypatch.setattr(torch.ops.voltserve, "rotate_and_cache", lambda *inputs: calls.append(inputs))
    step: Any = rotate_and_attend
    rotation = ("positions", "cos_sin", True, None, None, EPS)
    step("q", "k", "v", "output", LAYER, *rotation)
    update = ("q", "k", "v", *rotation, "cache k", "cache v", "slots")
    attend = ("attend", "q", "k", "v", "cache", metadata, "output")
    assert calls == ([update, attend] if requests else [attend])
