"""Checks and times the ops of a Gated DeltaNet layer on the GPU at hand; writes the result as JSON.

    python -m kernels.tools.gpu_check_gdn --ops PATH/ops.so [--quick] --output docs/results/NAME.json

Correctness is against float64 (kernels/tools/gdn_reference.py). Times are those of one rank of the 27B at TP=2: 8 key
and 24 value heads of 128. A CUDA graph runs many layers, so that no state is found in a cache. `--quick`: few and small
cases and no times, for compute-sanitizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.tools import gdn_reference
from kernels.tools.findings import Findings, parser

KEY_HEADS, VALUE_HEADS, DIM = 8, 24, 128  # of the 27B, a rank at TP=2
# Outputs are rounded to fp16 once; beyond that, of the largest output of the head and token.
HALF_ULP, OF_LARGEST = 2.0**-11, 2e-5
SUBNORMAL = 2.0**-24


@dataclass
class Step:
    """A step's requests."""

    lengths: list[int]
    slots: list[int]
    continued: list[bool]

    @property
    def starts(self) -> list[int]:
        """First tokens, and the end."""
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """slots (a column of a table), starts, continued."""
        table = torch.tensor([[slot, 1 << 30] for slot in self.slots], dtype=torch.int32, device="cuda")
        starts = torch.tensor(self.starts, dtype=torch.int32, device="cuda")
        return table[:, 0], starts, torch.tensor(self.continued, device="cuda")


STEPS = (
    Step([1], [3], [True]),
    Step([9], [0], [False]),
    Step([5, 1, 0, 33, 2], [1, 3, 0, 2, 4], [False, True, True, True, True]),
    Step([2, 1, 16], [-1, 2, 0], [True, False, True]),
    Step([31, 3, 1, 1, 64, 2, 29, 0, 7], [8, 7, 6, 5, 4, 3, 2, 1, 0], [True, False] * 4 + [True]),
    Step([300, 17], [1, 0], [False, True]),
)
TIMED = ((1, 1), (8, 1), (16, 1), (32, 1), (1, 512), (1, 2048), (4, 512))  # requests, tokens each
HEADS = ((2, 6), (3, 3), (8, 24))


class Layer:
    """A layer's weights, and caches of the convolution's and the heads' states, with gaps between slots as in vLLM."""

    def __init__(self, key_heads: int, value_heads: int, dim: int, slots: int, random: torch.Generator) -> None:
        self.key_heads, self.value_heads, self.dim = key_heads, value_heads, dim
        self.channels = (2 * key_heads + value_heads) * dim
        self.random = random
        self.weight = (0.5 * self.normal(self.channels, 4)).half()
        self.a_log = (0.5 + 7.5 * torch.rand(value_heads, device="cuda", generator=random)).log()
        self.dt_bias = -5 * torch.rand(value_heads, device="cuda", generator=random)
        conv = 3 * self.channels
        states = value_heads * dim * dim
        page = self.normal(slots, 8 + conv // 2 + states + 12)
        page[:, : 8 + conv // 2] = torch.nan
        self.conv_state = page.view(torch.half)[:, 16 : 16 + conv].unflatten(1, (3, self.channels))
        self.conv_state.copy_(self.normal(slots, 3, self.channels))
        self.state = page[:, 8 + conv // 2 :][:, :states].unflatten(1, (value_heads, dim, dim))
        self.page = page

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, device="cuda", generator=self.random)

    def inputs(self, tokens: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [tokens, C] as a part of wider rows; a and b halves of one tensor."""
        x = (spread * self.normal(tokens, self.channels + 4)).half()[:, : self.channels]
        b, a = (3 * self.normal(tokens, 2 * self.value_heads)).half().chunk(2, dim=1)
        return x, a, b

    def rule(self, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *requests: torch.Tensor | None) -> torch.Tensor:
        """The delta rule into an output that was NaN."""
        out = torch.full((len(qkv), self.value_heads, self.dim), torch.nan, dtype=torch.half, device="cuda")
        gates = (a, b, self.a_log, self.dt_bias)
        torch.ops.voltserve.gated_delta_rule(qkv, *gates, self.state, *requests, self.key_heads, out)
        return out


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = torch.ops.voltserve
        self.random = torch.Generator("cuda").manual_seed(3)

    def compare(self, kind: str, what: str, got: torch.Tensor, exact: torch.Tensor, rounding: float) -> None:
        """Notes the largest error as a share of what is allowed."""
        largest = exact.abs().amax(-1, keepdim=True)
        allowed = exact.abs() * rounding + OF_LARGEST * largest + (SUBNORMAL if rounding else 1e-30)
        self.all_within(kind, what, (got.double() - exact).abs() / allowed)

    def step(self, layer: Layer, step: Step, spread: float = 1.0) -> None:
        """Both ops on one step, against float64 and twice. Unused slots and the gaps between slots must not change."""
        what = f"heads {layer.key_heads}/{layer.value_heads} D {layer.dim} lengths {step.lengths} spread {spread:g}"
        x, a, b = layer.inputs(sum(step.lengths), spread)
        before = layer.page.clone()
        slots, starts, continued = step.tensors()
        expected_state = layer.conv_state.clone()
        arguments = (step.slots, step.starts, step.continued)
        exact = gdn_reference.causal_conv1d(x, layer.weight, expected_state, *arguments)
        y = self.ops.causal_conv1d(x, layer.weight, layer.conv_state, slots, starts, continued)
        self.compare("convolution", what, y, exact, HALF_ULP)
        self.expect("convolution", f"{what}: the cache", torch.equal(layer.conv_state, expected_state))

        expected = layer.state.double()
        gates = (a, b, layer.a_log, layer.dt_bias)
        exact = gdn_reference.gated_delta_rule(y, *gates, expected, *arguments, layer.key_heads)
        out = layer.rule(y, a, b, slots, starts, continued)
        self.compare("scan", what, out, exact, HALF_ULP)
        used = [slot for slot in step.slots if slot >= 0]
        self.compare("scan state", what, layer.state[used], expected[used], 0)
        after = layer.page.clone()
        layer.page.copy_(before)
        again = self.ops.causal_conv1d(x, layer.weight, layer.conv_state, slots, starts, continued)
        self.expect("convolution", f"{what}: other bits on a second run", same(y, again))
        self.expect("scan", f"{what}: other bits", same(out, layer.rule(y, a, b, slots, starts, continued)))
        self.expect("scan", f"{what}: another state on a second run", same(layer.page, after))
        states = slice(8 + 3 * layer.channels // 2, -12)
        after[:, 8 : states.start] = before[:, 8 : states.start]  # the convolution's, compared above
        after[used, states] = before[used, states]
        self.expect("both", f"{what}: wrote where no request's state is", same(after, before))

    def decode(self, layer: Layer, requests: int) -> None:
        """One token per request, with padding, as a step and as a replayed graph with other slots."""
        what = f"heads {layer.key_heads}/{layer.value_heads} D {layer.dim} {requests} requests"
        count = layer.state.shape[0]
        order = torch.randperm(count, device="cuda", generator=self.random)[:requests].int()
        slots = torch.cat([order, torch.full((3,), -1, dtype=torch.int32, device="cuda")])
        tokens = len(slots)
        x, a, b = layer.inputs(tokens)
        arguments = (slots.tolist(), list(range(tokens + 1)), [True] * tokens)
        conv_state, state = layer.conv_state.clone(), layer.state.double()
        before = layer.page.clone()
        exact_y = gdn_reference.causal_conv1d(x, layer.weight, conv_state, *arguments)
        y = self.ops.causal_conv1d(x, layer.weight, layer.conv_state, slots)
        self.compare("convolution, decoding", what, y, exact_y, HALF_ULP)
        self.expect("convolution, decoding", f"{what}: the cache", torch.equal(layer.conv_state, conv_state))
        gates = (a, b, layer.a_log, layer.dt_bias)
        exact = gdn_reference.gated_delta_rule(y, *gates, state, *arguments, layer.key_heads)
        out = layer.rule(y, a, b, slots, None, None)
        self.compare("decode", what, out, exact, HALF_ULP)
        self.compare("decode state", what, layer.state, state, 0)
        self.expect("decode", f"{what}: padding is not zero", not out[requests:].any() and not y[requests:].any())

        after = layer.page.clone()
        still = torch.full_like(slots, -1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured_y = self.ops.causal_conv1d(x, layer.weight, layer.conv_state, still)
            captured = layer.rule(captured_y, a, b, still, None, None)
        layer.page.copy_(before)
        still.copy_(slots)
        graph.replay()
        torch.cuda.synchronize()
        self.expect("graph", f"{what}: another output", same(captured, out) and same(captured_y, y))
        self.expect("graph", f"{what}: another state", same(layer.page, after))

    def refused(self) -> None:
        """Arguments that the kernels cannot take are named before anything is launched."""
        layer = Layer(2, 6, 32, 4, self.random)
        x, a, b = layer.inputs(2)
        slots = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        wide = torch.zeros(4, 6, 16, 16, device="cuda")
        odd = torch.zeros(4, layer.state[0].numel() + 1, device="cuda")[:, 1:].unflatten(1, layer.state.shape[1:])
        calls: dict[str, Callable[[], Any]] = {
            "K = 32, 64 or 128, got 16": lambda: layer_of(wide).rule(x[:, :160], a, b, slots, None, None),
            "multiples of 16 bytes": lambda: layer_of(odd).rule(x, a, b, slots, None, None),
            "slots: expected": lambda: layer.rule(x, a, b, slots[:1], None, None),
            "on GPU": lambda: self.ops.causal_conv1d(x, layer.weight, layer.conv_state, slots.cpu()),
        }

        def layer_of(state: torch.Tensor) -> Layer:
            made = Layer(2, 6, state.shape[-1], 4, self.random)
            made.state = state
            return made

        for message, call in calls.items():
            try:
                call()
                self.expect("refusal", f"nothing was raised, expected {message!r}", False)
            except RuntimeError as error:
                self.expect("refusal", f"expected {message!r}, got {error}", message in str(error))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bits are equal, NaN included."""
    numbers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(numbers), b.contiguous().view(numbers))


def seconds_of(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    """The median of 20 replays, divided by the launches."""
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(sorted(times)[10]) / launches


def copy_bytes_per_second() -> float:
    """The rate of reading and writing a gigabyte, counted as two."""
    a = torch.zeros(1 << 28, device="cuda")
    b = torch.empty_like(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(a, 1, out=b)  # a plain copy would run on the copy engine
    return 2 * a.nbytes / seconds_of(graph, 1)


def times(random: torch.Generator, requests: int, tokens: int) -> list[dict[str, Any]]:
    """Seconds of each op on `tokens` tokens of each request; for decoding also the bytes of state per second."""
    ops = torch.ops.voltserve
    many = 48 if requests <= 8 else 16
    layers = [Layer(KEY_HEADS, VALUE_HEADS, DIM, requests, random) for _ in range(many)]
    slots, starts, continued = Step([tokens] * requests, list(range(requests)), [True] * requests).tensors()
    cut = (None, None) if tokens == 1 else (starts, continued)
    x, a, b = layers[0].inputs(requests * tokens)
    out = torch.empty(requests * tokens, VALUE_HEADS, DIM, dtype=torch.half, device="cuda")
    qkv = x.contiguous()

    def convolution(layer: Layer) -> None:
        ops.causal_conv1d(x, layer.weight, layer.conv_state, slots, *cut)

    def rule(layer: Layer) -> None:
        gates = (a, b, layer.a_log, layer.dt_bias)
        ops.gated_delta_rule(qkv, *gates, layer.state, slots, *cut, KEY_HEADS, out)

    rows = []
    for name, op in (("causal_conv1d", convolution), ("gated_delta_rule", rule)):
        op(layers[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in layers:
                op(layer)
        seconds = seconds_of(graph, many)
        row = {"op": name, "requests": requests, "tokens_each": tokens, "microseconds": round(seconds * 1e6, 2)}
        if name == "gated_delta_rule" and tokens == 1:
            row["state_gb_per_second"] = round(2 * 4 * requests * VALUE_HEADS * DIM * DIM / seconds / 1e9, 1)
        rows.append(row)
    return rows


def main() -> int:
    """Returns 0 if every case passed."""
    options = parser(__doc__)
    options.add_argument("--ops", type=Path, required=True)
    options.add_argument("--quick", action="store_true")
    arguments = options.parse_args()
    torch.ops.load_library(str(arguments.ops))
    checker = Checker()
    for heads in HEADS[:1] if arguments.quick else HEADS:
        for dim in (32, 64, 128):
            for step in STEPS[:4] if arguments.quick else STEPS:
                for spread in (1.0, 1e-4, 100.0):
                    checker.step(Layer(*heads, dim, 9, checker.random), step, spread)
            for requests in (1, 2, 7):
                checker.decode(Layer(*heads, dim, 9, checker.random), requests)
    checker.refused()
    if not arguments.quick:
        checker.step(Layer(KEY_HEADS, VALUE_HEADS, DIM, 2, checker.random), Step([4096], [1], [False]))
    figures: dict[str, Any] = {}
    if not arguments.quick:
        figures["copy_gb_per_second"] = round(copy_bytes_per_second() / 1e9, 1)
        figures["times"] = [row for shape in TIMED for row in times(checker.random, *shape)]
    what = "Gated DeltaNet's ops against float64, and their times (27B, a rank at TP=2, one layer)"
    return checker.finish(what, arguments.output, **figures)


if __name__ == "__main__":
    sys.exit(main())
