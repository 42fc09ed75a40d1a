"""All decoder layers in one operation, with every instruction set that this machine has, against float64 in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

OPS = torch.ops.voltserve
GROUP = 16
EPS = 1e-5
PAGE = 32


@dataclass
class Model:
    """Two or three layers of random weights; `dense` has what the packed ones stand for, in float64."""

    hidden: int = 64
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    intermediate: int = 96
    layers: int = 2
    bias: bool = False
    head_norms: bool = False

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.dense: list[dict[str, torch.Tensor]] = []
        tensors: list[torch.Tensor] = []
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        none = torch.empty(0)
        for _ in range(self.layers):
            weights: dict[str, torch.Tensor | list[torch.Tensor]] = {
                "input_norm": self.vector(self.hidden),
                "qkv": self.matrix(qkv, self.hidden),
                "bias": self.vector(qkv) - 1 if self.bias else none,
                "q_norm": self.vector(self.dim) if self.head_norms else none,
                "k_norm": self.vector(self.dim) if self.head_norms else none,
                "out": self.matrix(self.hidden, self.heads * self.dim),
                "post_norm": self.vector(self.hidden),
                "gate_up": self.matrix(2 * self.intermediate, self.hidden),
                "down": self.matrix(self.hidden, self.intermediate),
            }
            self.dense.append({})
            for name, weight in weights.items():
                of_op = weight if isinstance(weight, list) else [weight]
                tensors += of_op
                made = OPS.nvfp4_dequantize(*of_op, GROUP, torch.float32) if len(of_op) == 3 else of_op[0]
                self.dense[-1][name] = made.double()
        self.final_norm = self.vector(self.hidden)
        self.cos_sin = torch.empty(4096, self.dim)
        angles = torch.arange(4096)[:, None] / 10000 ** (torch.arange(self.dim // 2) / (self.dim // 2))
        self.cos_sin[:] = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.scale = self.dim**-0.5
        shape = (GROUP, self.heads, self.kv_heads, EPS, self.scale)
        self.tensors = tensors
        self.op = OPS.decoder_make(tensors, self.final_norm, *shape)

    def vector(self, length: int) -> torch.Tensor:
        return torch.rand(length, generator=self.random) + 0.5

    def matrix(self, rows: int, columns: int) -> list[torch.Tensor]:
        codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=self.random)
        scales = torch.rand(rows, columns // GROUP, generator=self.random).to(torch.float8_e4m3fn)
        factor = (torch.rand(rows, generator=self.random) + 0.5) / (3 * columns**0.5)
        return [*OPS.nvfp4_pack(codes, scales, GROUP), factor]

    def reference(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Hidden states [L, hidden] in float64 of one request with all its positions at once."""
        residual = embeddings.double()
        length = len(embeddings)
        cos, sin = self.cos_sin[:length].double().chunk(2, dim=-1)

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return functional.rms_norm(x, x.shape[-1:], weight.double(), EPS)

        def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            x = x.view(length, -1, self.dim).transpose(0, 1)
            a, b = (norm(x, weight) if weight.numel() else x).chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        for layer in self.dense:
            qkv = norm(residual, layer["input_norm"]) @ layer["qkv"].T
            if self.bias:
                qkv += layer["bias"]
            q, k, v = qkv.tensor_split([self.heads * self.dim, (self.heads + self.kv_heads) * self.dim], dim=-1)
            attended = functional.scaled_dot_product_attention(
                heads(q, layer["q_norm"]),
                heads(k, layer["k_norm"]),
                v.reshape(length, self.kv_heads, self.dim).transpose(0, 1),
                is_causal=True,
                scale=self.scale,
                enable_gqa=True,
            )
            residual = residual + attended.transpose(0, 1).reshape(length, -1) @ layer["out"].T
            gate, up = (norm(residual, layer["post_norm"]) @ layer["gate_up"].T).chunk(2, dim=-1)
            residual = residual + (functional.silu(gate) * up) @ layer["down"].T
        return norm(residual, self.final_norm)


class Requests:
    """Requests of one model with pages in random order, and the steps that they take together."""

    def __init__(self, model: Model, lengths: list[int]) -> None:
        self.model = model
        pages_each = math.ceil(max(lengths) / PAGE) + 1
        order = torch.randperm(len(lengths) * pages_each, generator=model.random).to(torch.int32)
        self.block_table = order.view(len(lengths), pages_each)
        shape = (order.numel(), 2, model.kv_heads, PAGE, model.dim)
        # What was never written must not count.
        self.caches = [torch.full(shape, torch.nan) for _ in range(model.layers)]
        self.embeddings = [torch.randn(length, model.hidden, generator=model.random) for length in lengths]
        self.done = [0] * len(lengths)

    def arguments(self, counts: list[int]) -> list[Any]:
        """Of decoder_step, for a step of that many tokens of each request."""
        x, positions, slots = [], [], []
        for request, count in enumerate(counts):
            at = torch.arange(self.done[request], self.done[request] + count)
            x.append(self.embeddings[request][at])
            positions.append(at)
            slots.append(self.block_table[request][at // PAGE].long() * PAGE + at % PAGE)
            self.done[request] += count
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor(self.done, dtype=torch.int32)
        tokens = [torch.cat(x), torch.cat(positions), self.model.cos_sin, self.caches, torch.cat(slots)]
        return [self.model.op, *tokens, self.block_table, starts, lengths]

    def step(self, counts: list[int]) -> list[torch.Tensor]:
        """The hidden states of each request's new tokens."""
        y: torch.Tensor = OPS.decoder_step(*self.arguments(counts))
        return list(torch.split(y, counts))


def check(model: Model, counts: list[list[int]]) -> None:
    """Steps of so many tokens of each request, against all positions at once."""
    requests = Requests(model, [sum(column) for column in zip(*counts, strict=True)])
    got = [torch.cat(parts) for parts in zip(*(requests.step(step) for step in counts), strict=True)]
    for y, embeddings in zip(got, requests.embeddings, strict=True):
        torch.testing.assert_close(y.double(), model.reference(embeddings), rtol=1e-4, atol=1e-5)


def test_tokens_one_by_one_are_the_tokens_all_at_once(instruction_set: str) -> None:
    check(Model(), [[1]] * 70)


def test_requests_of_different_lengths_share_a_step(instruction_set: str) -> None:
    check(Model(), [[5, 40, 1], [1, 1, 1], [1, 1, 1], [1, 30, 0], [0, 1, 1]])


@pytest.mark.parametrize(
    "model",
    [
        Model(bias=True),
        Model(head_norms=True, layers=3),
        Model(heads=4, kv_heads=4, dim=64, hidden=128),
        Model(heads=8, kv_heads=1, dim=256, hidden=96, intermediate=48),
    ],
    ids=["bias of q, k, v", "norms by head", "no shared heads", "wide heads"],
)
def test_other_shapes(instruction_set: str, model: Model) -> None:
    check(model, [[7, 3], [1, 1], [1, 1]])


def test_a_long_context_is_cut_into_spans(instruction_set: str) -> None:
    check(Model(layers=1), [[1024], [1], [1], [600], [1]])


def test_a_negative_slot_is_written_nowhere() -> None:
    requests = Requests(Model(), [3])
    arguments = requests.arguments([3])
    arguments[5] = torch.full_like(arguments[5], -1)
    for cache in requests.caches:
        cache.zero_()
    OPS.decoder_step(*arguments)
    assert not any(cache.any() for cache in requests.caches)


def test_no_token_is_no_step() -> None:
    requests = Requests(Model(), [3])
    assert requests.step([0])[0].shape == (0, 64)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 10**6, "decoder: expected one of the .* that were made, got 1000000"),
        (1, torch.zeros(2, 63), r"x: expected contiguous Float \[any, 64\]"),
        (2, torch.tensor([0, 4096]), "positions: expected below 4096, got 4096"),
        (4, [], "caches: expected one for each of 2 layers, got 0"),
        (5, torch.tensor([0, 10**6]), "slots: expected below .*, got 1000000"),
        (6, torch.zeros(1, 0, dtype=torch.int32), "block_table: expected 1 pages for 2 positions, got 0"),
        (6, torch.full((1, 2), 99, dtype=torch.int32), "block_table: expected 0 to 1, got 99"),
        (7, torch.tensor([0, 3], dtype=torch.int32), "query_start: expected 0 to 2, got 0 to 3"),
        (8, torch.tensor([1], dtype=torch.int32), "seq_lens: expected at least the 2 tokens of the step, got 1"),
    ],
)
def test_a_bad_argument_of_a_step_is_named(place: int, value: object, message: str) -> None:
    arguments = Requests(Model(), [2]).arguments([2])
    arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        OPS.decoder_step(*arguments)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(3, dtype=torch.uint8), "qkv: expected contiguous Byte"),
        (4, torch.zeros(3), "qkv_bias: expected contiguous Float"),
        (10, torch.zeros(3), r"post_norm: expected contiguous Float \[64\]"),
    ],
)
def test_a_bad_tensor_of_a_layer_is_named(place: int, value: torch.Tensor, message: str) -> None:
    model = Model()
    tensors = [*model.tensors]
    tensors[place] = value
    with pytest.raises(RuntimeError, match=message):
        OPS.decoder_make(tensors, model.final_norm, GROUP, model.heads, model.kv_heads, EPS, model.scale)
    with pytest.raises(RuntimeError, match="tensors: expected 17 a layer, got 16"):
        OPS.decoder_make(tensors[:16], model.final_norm, GROUP, model.heads, model.kv_heads, EPS, model.scale)
