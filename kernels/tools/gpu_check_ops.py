"""Checks torch.ops.voltserve.* on the GPU at hand: the binding around the kernels that gpu_check.py checks.

    python -m kernels.tools.gpu_check_ops --ops PATH/ops.so --output docs/results/NAME.json

It covers shapes and views of x, the path through cuBLAS, CUDA graphs, two streams at once, experts and the gate. It
also covers consecutive kernels and the messages for bad arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.tools.findings import Findings, parser
from kernels.tools.gpu_check import align
from kernels.tools.reference import E4M3_NAN, Canonical, random_activations, random_weights, worst_error

Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
# Above the fused kernels' range, weights are rounded to fp16 before the GEMM, each by at most 2^-11 of itself.
DENSE_ALLOWANCE = 60
FUSED_TOKENS, FUSED_TOKENS_AFTER_VOLTA = 768, 32  # plan.cpp


class Checker(Findings):
    """What the checks share."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = torch.ops.voltserve
        self.random = torch.Generator("cuda").manual_seed(11)
        self.fused_tokens = FUSED_TOKENS if torch.cuda.get_device_capability()[0] < 8 else FUSED_TOKENS_AFTER_VOLTA

    def weight(self, n: int, k: int, group: int = 16) -> tuple[Canonical, Weight]:
        """A random matrix, as it is and as the ops take it."""
        w = random_weights(n, k, group, self.random)
        packed, scales = self.ops.nvfp4_pack(w.codes, w.scales.view(torch.float8_e4m3fn), group)
        return w, (packed, scales, w.row_factor, group)

    def product(self, name: str, x: torch.Tensor, w: Canonical, weight: Weight) -> None:
        """One call against float64."""
        n, m = w.codes.shape[0], x.numel() // x.shape[-1]
        allowance = 1 if m <= self.fused_tokens else DENSE_ALLOWANCE
        bias = torch.randn(n, device="cuda", generator=self.random).half()
        y = self.ops.nvfp4_linear(x, *weight, bias)
        error, detail = worst_error(y.reshape(-1, n), x.reshape(-1, x.shape[-1]), w.double(), bias)
        self.expect(name, f"shape {tuple(y.shape)}", y.shape == (*x.shape[:-1], n))
        self.within("product" if allowance == 1 else "product on cuBLAS", name, error / allowance, detail)

    def raises(self, name: str, message: str, call: Callable[[], Any]) -> None:
        """The call must raise RuntimeError with `message` in it."""
        try:
            call()
        except RuntimeError as error:
            self.expect(name, str(error).splitlines()[0], message in str(error))
        else:
            self.expect(name, "raised nothing", False)


def shapes(c: Checker) -> None:
    """Views, leading dimensions, odd sizes, no tokens, many tokens."""
    for n, k, group in ((1000, 576, 16), (1000, 576, 32), (33, 48, 16)):
        w, weight = c.weight(n, k, group)
        for m in (1, 2, 3, 4, 5, 8, 16, 32, 33, 200, 768, 769, 4096):
            c.product(f"{n}x{k} g={group} M={m}", random_activations(m, k, c.random), w, weight)
        c.product(f"{n}x{k} three dimensions", random_activations(6, k, c.random).view(2, 3, k), w, weight)
        wide = random_activations(5, 2 * k + 3, c.random)
        c.product(f"{n}x{k} misaligned view", wide[:, 3 : 3 + k], w, weight)
        c.product(f"{n}x{k} every other column", wide[:, : 2 * k : 2], w, weight)
        empty = c.ops.nvfp4_linear(torch.empty(0, k, dtype=torch.float16, device="cuda"), *weight)
        c.expect("no tokens", f"{n}x{k}: shape {tuple(empty.shape)}", empty.shape == (0, n))
        dense = c.ops.nvfp4_dequantize(*weight, torch.float16)
        exact = w.double()
        c.all_within("dequantize", f"{n}x{k}", (dense.double() - exact).abs() / (exact.abs().max() * 2**-11))


def graphs_and_streams(c: Checker) -> None:
    """A captured call replays with new inputs; two streams do not disturb each other."""
    w, weight = c.weight(5120, 2048)
    for m in (1, 4, 8, 32):
        x = random_activations(m, 2048, c.random)
        c.ops.nvfp4_linear(x, *weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = c.ops.nvfp4_linear(x, *weight)
        for replay in range(3):
            x.copy_(random_activations(m, 2048, c.random))
            y.fill_(torch.nan)
            graph.replay()
            error, detail = worst_error(y, x, w.double())
            c.within("graph", f"M={m} replay {replay}", error, detail)
        expected = c.ops.nvfp4_linear(x, *weight)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for _ in range(50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(c.ops.nvfp4_linear(x, *weight))
        torch.cuda.synchronize()
        c.expect("two streams", f"M={m}: other bits", all(torch.equal(r, expected) for r in results))
        first_calls_in_a_capture(c, x, weight, expected, m)


def first_calls_in_a_capture(c: Checker, x: torch.Tensor, weight: Weight, expected: torch.Tensor, m: int) -> None:
    """A stream's first call may be captured, and the graphs captured on it replayed in any order."""
    stream = torch.cuda.Stream()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = c.ops.nvfp4_linear(x, *weight)
        graphs.append((graph, y))
    for graph, y in reversed(graphs):
        y.fill_(torch.nan)
        graph.replay()
        c.expect("first call captured", f"M={m}: other bits", torch.equal(y, expected))


def experts(c: Checker) -> None:
    """The grouped op against each expert alone: for whole tiles, and for widths that are no multiple of a tile."""
    count, tokens, top_k = 8, 50, 2
    routes = torch.rand(tokens, count, device="cuda", generator=c.random).topk(top_k).indices
    for n, k in ((768, 1024), (320, 80), (80, 160)):
        members = [c.weight(n, k) for _ in range(count)]
        packed, scales = stacked([m[1][0] for m in members]), stacked([m[1][1] for m in members])
        factor = torch.stack([m[1][2] for m in members])
        x = random_activations(tokens, k, c.random)
        for block in (8, 16, 32, 64):
            slots, owners = align(routes, count, block)
            padded = torch.tensor([len(slots)], dtype=torch.int32, device="cuda")
            y = c.ops.nvfp4_moe_linear(x, packed, scales, factor, 16, slots, owners, padded, top_k)
            for expert in range(count):
                token, choice = (routes == expert).nonzero(as_tuple=True)
                error, detail = worst_error(y[token * top_k + choice], x[token], members[expert][0].double())
                c.within("experts", f"[{n}, {k}] block={block} expert {expert}", error, detail)


def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """[E, rows, columns] of E views, with the padding that the packed layout holds beside the columns."""
    whole = torch.stack([part.as_strided((part.shape[0], part.stride(0)), part.stride()) for part in parts])
    return whole.narrow(2, 0, parts[0].shape[1])


def gates(c: Checker) -> None:
    """silu_and_mul: any leading dimensions, in graphs, as PyTorch rounds."""
    for shape in ((1, 1152), (16, 1152), (2, 3, 1152), (100, 1152), (0, 1152)):
        x = torch.randn(shape, device="cuda", generator=c.random).half()
        y = c.ops.silu_and_mul(x)
        expected = torch.nn.functional.silu(x[..., :576]) * x[..., 576:]
        c.expect("silu_and_mul", f"{shape}: shape {tuple(y.shape)}", y.shape == expected.shape)
        error = (y.float() - expected.float()).abs() / (2**-9 * expected.float().abs() + 2**-23)
        c.all_within("silu_and_mul", f"{shape}", error)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = c.ops.silu_and_mul(x)
        captured.fill_(torch.nan)
        graph.replay()
        c.expect("silu_and_mul", f"{shape}: other bits in a graph", torch.equal(captured, y))


def rows_of_kernels(c: Checker) -> None:
    """Early launches give the same bits one after another, in graphs, and one at a time."""
    (_, up), (_, down) = c.weight(4096, 1024), c.weight(1024, 2048)
    weight = torch.ones(1024, dtype=torch.float16, device="cuda")

    def row(x: torch.Tensor, apart: bool) -> torch.Tensor:
        residual = x.clone()
        for _ in range(8):
            steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
                lambda x: c.ops.all_reduce_rms_norm(x, residual, weight, 1e-6, [], [], None, 0, 0.0),
                lambda x: c.ops.nvfp4_linear(x, *up),
                c.ops.silu_and_mul,
                lambda x: c.ops.nvfp4_linear(x, *down),
            )
            for step in steps:
                x = step(x)
                if apart:
                    torch.cuda.synchronize()
        return torch.cat([x, residual])

    for m in (1, 2, 4, 8, 16, 32):
        xs = [random_activations(m, 1024, c.random) for _ in range(20)]
        expected = [row(x, apart=True) for x in xs]
        together = [row(x, apart=False) for x in xs]
        fed = xs[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = row(fed, apart=False)
        for i, x in enumerate(xs):
            c.expect("row", f"M={m} {i}: a number that is none", bool(expected[i].isfinite().all()))
            c.expect("row", f"M={m} {i}: other bits", torch.equal(together[i], expected[i]))
            fed.copy_(x)
            graph.replay()
            c.expect("row", f"M={m} {i}: other bits in a graph", torch.equal(made, expected[i]))


def bad_arguments(c: Checker) -> None:
    """The message names each bad argument."""
    w, weight = c.weight(64, 64)
    gate = c.ops.silu_and_mul
    wide = random_activations(2, 64, c.random)
    c.raises("silu's dtype", "x: expected contiguous Half [2, 64]", lambda: gate(wide.float()))
    c.raises("silu's width", "x: expected [..., 2 n] with n a multiple of 8", lambda: gate(wide[:, :40].contiguous()))
    x = random_activations(2, 64, c.random)
    nan = w.scales.clone()
    nan[3, 2] = E4M3_NAN
    pack = c.ops.nvfp4_pack
    c.raises("NaN scale", "NaN at [3, 2]", lambda: pack(w.codes, nan.view(torch.float8_e4m3fn), 16))
    c.raises("group", "group_size: expected 16 or 32, got 8", lambda: pack(w.codes, nan.view(torch.float8_e4m3fn), 8))
    c.raises("x's dtype", "x: expected Half, got Float", lambda: c.ops.nvfp4_linear(x.float(), *weight))
    c.raises("x's width", "x: expected [..., 64] on GPU 0", lambda: c.ops.nvfp4_linear(x[:, :32], *weight))
    c.raises("x's place", "got Half [2, 64] on the CPU", lambda: c.ops.nvfp4_linear(x.cpu(), *weight))
    c.raises("bias", "bias: expected contiguous Half [64]", lambda: c.ops.nvfp4_linear(x, *weight, x[0, :32]))
    c.raises("packed", "packed: expected", lambda: c.ops.nvfp4_linear(x, weight[0][:, 1:], *weight[1:]))


def main() -> int:
    """Returns 0 if every check passed."""
    options = parser(__doc__)
    options.add_argument("--ops", type=Path, required=True)
    arguments = options.parse_args()
    torch.ops.load_library(str(arguments.ops))
    checker = Checker()
    for part in (shapes, graphs_and_streams, experts, gates, rows_of_kernels, bad_arguments):
        part(checker)
    return checker.finish("torch.ops.voltserve on a GPU", arguments.output)


if __name__ == "__main__":
    sys.exit(main())
