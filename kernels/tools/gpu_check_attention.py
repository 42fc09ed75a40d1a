"""Checks the attention kernels on the GPU at hand against float64 and vLLM's Triton backend; writes the result as JSON.

    python -m kernels.tools.gpu_check_attention [--quick] [--ops ops.so] [--vllm FOLDER] --output docs/results/NAME.json

`--ops`: through torch.ops.voltserve, which this library of kernels/setup.py defines, instead of the launchers.
`--quick`: few and small cases, for compute-sanitizer. `--vllm`: the vllm package folder, for the comparison with
Triton.

Caches hold NaN wherever no position lies. Block tables point nowhere past their request's blocks. Outputs are NaN
before each launch, and the memory around them must not change.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.tools import triton_peer
from kernels.tools.attention_reference import Batch, paged_attention, random_batch
from kernels.tools.findings import Findings, parser
from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import DECODE_TOKENS, AttentionLibrary

GUARD = 64  # elements of poison before and after an output
Lengths = tuple[tuple[int, int], ...]  # (new tokens, positions) of each request
DECODE: Lengths = ((1, 1), (1, 7), (1, 8), (1, 9), (0, 0), (1, 1000), (1, 63), (1, 513))
SPECULATIVE: Lengths = ((2, 2), (8, 8), (5, 300), (3, 1001), (8, 777), (1, 40))
PREFILL: Lengths = ((9, 9), (64, 64), (65, 130), (100, 777), (0, 0), (200, 200))
MIXED: Lengths = ((1, 500), (300, 300), (4, 40), (17, 1001), (1, 1), (8, 9), (33, 65))
MANY: Lengths = tuple((1, 1 + 37 * i % 300) for i in range(70))
LONG: Lengths = ((1, 131072), (1, 5), (3, 40000))
LONG_PREFILL: Lengths = ((16, 131072), (1, 131072))
HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS = ((8, 1), (6, 2), (4, 4), (5, 1), (14, 2))
BLOCK_SIZES = (8, 16, 24, 784)


def cases(quick: bool) -> Iterator[tuple[Lengths, int, int, int, int, int, float]]:
    """(lengths, query heads, key heads, head size, block size, window, soft cap)."""
    if quick:
        small: Lengths = ((1, 1), (1, 70), (3, 20), (12, 33), (0, 0), (70, 70), (1, 2000))
        for head_dim, (q_heads, kv_heads) in itertools.product((64, 80, 128, 256), ((4, 1), (2, 2))):
            yield small, q_heads, kv_heads, head_dim, 8, 0, 0.0
            yield small, q_heads, kv_heads, head_dim, 24, 17, 20.0
        return
    for head_dim, (q_heads, kv_heads), lengths in itertools.product(
        HEAD_DIMS, HEADS, (DECODE, SPECULATIVE, PREFILL, MIXED)
    ):
        for block_size in BLOCK_SIZES:
            yield lengths, q_heads, kv_heads, head_dim, block_size, 0, 0.0
        for window, soft_cap in ((1, 0.0), (33, 0.0), (128, 20.0), (0, 50.0)):
            yield lengths, q_heads, kv_heads, head_dim, 16, window, soft_cap
    for head_dim in HEAD_DIMS:
        yield MANY, 8, 2, head_dim, 16, 0, 0.0
        yield ((1, 4096),), 64, 4, head_dim, 16, 0, 0.0  # 16 query heads per key head
        yield ((8, 4096),), 64, 4, head_dim, 16, 0, 0.0  # 128 rows: two blocks per split
        yield LONG, 8, 1, head_dim, 16, 0, 0.0
        yield LONG, 8, 1, head_dim, 16, 4096, 0.0
    yield LONG_PREFILL, 4, 1, 128, 16, 0, 0.0
    yield LONG_PREFILL, 4, 1, 256, 16, 0, 0.0


class Ops:
    """torch.ops.voltserve's attention with AttentionLibrary's methods, so that the same cases check the binding."""

    def attention(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        query_start: torch.Tensor, seq_lens: torch.Tensor, decode_query_len: int, max_query_len: int,
        out: torch.Tensor, scale: float, window: int = 0, soft_cap: float = 0.0,
    ) -> Callable[[], None]:  # fmt: skip
        """A callable that calls the op."""
        batch = (q, k_cache, v_cache, block_table, query_start, seq_lens, decode_query_len, max_query_len)
        return lambda: torch.ops.voltserve.paged_attention(*batch, scale, window, soft_cap, out)

    def reshape_and_cache(self, *tensors: torch.Tensor) -> None:
        """Calls the op."""
        torch.ops.voltserve.reshape_and_cache(*tensors)


class Checker(Findings):
    """Runs cases and keeps the worst of each kind."""

    def __init__(self, library: AttentionLibrary | Ops, triton: Any) -> None:
        super().__init__()
        self.native, self.triton = library, triton
        self.random = torch.Generator("cuda").manual_seed(11)

    def guarded(self, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer, view of `shape` with a gap after each token), all NaN."""
        tokens, heads, head_dim = shape
        stride = heads * head_dim + 16
        buffer = torch.full((tokens * stride + 2 * GUARD,), torch.nan, dtype=torch.float16, device="cuda")
        view = buffer[GUARD : GUARD + tokens * stride].view(tokens, stride)[:, : heads * head_dim]
        return buffer, view.unflatten(1, (heads, head_dim))

    def case(
        self,
        lengths: Lengths,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int,
        soft_cap: float,
    ) -> None:
        """One batch of every kind of request, with and without outliers, in both cache layouts."""
        for outliers in (False, True):
            batch = random_batch(
                lengths, q_heads, kv_heads, head_dim, block_size, self.random, outliers=outliers, interleaved=outliers
            )
            what = (
                f"D={head_dim} heads {q_heads}/{kv_heads} blocks of {block_size} window={window} cap={soft_cap} "
                f"outliers={outliers} lengths={lengths[:8]}"
            )
            scale = head_dim**-0.5
            known = (batch.block_table, batch.query_start, batch.seq_lens)
            exact, allowed = paged_attention(
                batch.q, batch.k_cache, batch.v_cache, *known, scale, window, soft_cap
            )  # fmt: skip
            short = [new for new, _ in lengths if 0 < new <= DECODE_TOKENS]
            longest = max(new for new, _ in lengths)
            buffer, out = self.guarded(batch.q.shape)
            launch = self.native.attention(
                batch.q, batch.k_cache, batch.v_cache, *known, max(short, default=0), longest, out,
                scale, window, soft_cap,
            )  # fmt: skip
            launch()
            torch.cuda.synchronize()
            route = "prefill" if not short else "decode" if longest <= DECODE_TOKENS else "mixed"
            kind = f"{route} {head_dim}"
            self.all_within(kind, what, (out.double() - exact).abs() / allowed)
            outside = buffer.clone()
            outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(torch.nan)
            if not outside.isnan().all():
                self.failures.append(f"{kind} {what}: wrote outside its output")
            first = out.clone()
            for _ in range(2):
                out.fill_(torch.nan)
                launch()
                if not torch.equal(out.view(torch.int16), first.view(torch.int16)):
                    self.failures.append(f"{kind} {what}: other bits on a second run")
                    break
            # Each setting is a kernel for Triton to compile: one group size, with everything and with nothing.
            if self.triton is not None and (q_heads, kv_heads, block_size) == (8, 1, 16) and window in (0, 128):
                self.compare_with_triton(kind, what, batch, out, allowed, longest, scale, window, soft_cap)

    def compare_with_triton(
        self, kind: str, what: str, batch: Batch, ours: torch.Tensor, allowed: torch.Tensor, longest: int,
        scale: float, window: int, soft_cap: float,
    ) -> None:  # fmt: skip
        """Each may have the allowed error, in opposite directions."""
        theirs = torch.empty_like(batch.q)
        # Triton multiplies values past a request's end by 0: NaN is not allowed there, and its table must be valid.
        keys, values = (cache.nan_to_num(0.0) for cache in (batch.k_cache, batch.v_cache))
        table = batch.block_table.clamp(max=keys.shape[0] - 1)
        triton_peer.launcher(
            self.triton, batch.q, keys, values, table, batch.query_start, batch.seq_lens, longest,
            int(batch.seq_lens.max()), theirs, scale, window, soft_cap,
        )()  # fmt: skip
        self.all_within(f"beside Triton, {kind}", what, (ours.double() - theirs.double()).abs() / (2 * allowed))

    def cache(self, kv_heads: int, head_dim: int, block_size: int, interleaved: bool) -> None:
        """reshape_and_cache writes every element to its slot, writes no padding, and leaves all else unchanged."""
        batch = random_batch(
            MIXED, kv_heads, kv_heads, head_dim, block_size, self.random, interleaved=interleaved
        )  # fmt: skip
        expected = [cache.clone() for cache in (batch.k_cache, batch.v_cache)]
        block, token = batch.slots // block_size, batch.slots % block_size
        slots = batch.slots.clone()
        slots[::5] = -1
        for cache in (batch.k_cache, batch.v_cache):
            cache[block, token] = 7.0
        for cache in expected:
            cache[block[::5], token[::5]] = 7.0
        self.native.reshape_and_cache(batch.key, batch.value, batch.k_cache, batch.v_cache, slots)
        self.cases += 1
        for name, cache, wanted in zip("kv", (batch.k_cache, batch.v_cache), expected, strict=True):
            if not torch.equal(cache.nan_to_num(1e4), wanted.nan_to_num(1e4)):
                self.failures.append(f"reshape_and_cache {name} D={head_dim} blocks of {block_size}: differs")

    def graph(self, head_dim: int) -> None:
        """A captured step stays right when its requests have grown, one has ended and the table has changed."""
        lengths: Lengths = ((1, 3000), (1, 50), (1, 700), (1, 1))
        batch = random_batch(lengths, 8, 2, head_dim, 16, self.random)
        out = torch.full_like(batch.q, torch.nan)
        seq_lens, starts = torch.ones_like(batch.seq_lens), batch.query_start.clone()
        table = torch.zeros_like(batch.block_table)
        batch.k_cache[0], batch.v_cache[0] = 0, 0
        launch = self.native.attention(
            batch.q, batch.k_cache, batch.v_cache, table, starts, seq_lens, 1, 1, out, head_dim**-0.5
        )
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        table.copy_(batch.block_table)
        seq_lens.copy_(batch.seq_lens)
        starts[-1], seq_lens[-1] = 3, 0
        out.fill_(torch.nan)
        graph.replay()
        exact, allowed = paged_attention(
            batch.q, batch.k_cache, batch.v_cache, table, starts, seq_lens, head_dim**-0.5
        )  # fmt: skip
        self.all_within(f"graph {head_dim}", f"D={head_dim}", ((out.double() - exact).abs() / allowed)[:3])
        if not out[3].isnan().all():
            self.failures.append(f"graph D={head_dim}: wrote a request that has ended")


def main() -> int:
    """Returns 0 if every case passed."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--library", type=Path, default=LIBRARY)
    options.add_argument("--ops", type=Path)
    options.add_argument("--vllm", type=Path)
    arguments = options.parse_args()
    if arguments.ops:
        torch.ops.load_library(arguments.ops)
    triton = triton_peer.load(arguments.vllm) if arguments.vllm else None
    references = "float64 and vLLM's Triton backend" if triton else "float64"
    checker = Checker(Ops() if arguments.ops else AttentionLibrary(arguments.library), triton)
    for case in cases(arguments.quick):
        checker.case(*case)
    for head_dim, block_size, interleaved in itertools.product((64, 80, 256), (8, 24), (False, True)):
        checker.cache(3, head_dim, block_size, interleaved)
    if not arguments.quick:
        for head_dim in HEAD_DIMS:
            checker.graph(head_dim)
    what = f"correctness of the attention {'ops' if arguments.ops else 'kernels'} against {references}"
    return checker.finish(what, arguments.output, library=str(arguments.ops or arguments.library))


if __name__ == "__main__":
    sys.exit(main())
