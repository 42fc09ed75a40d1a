"""Times of the NVFP4 GEMM on the GPU at hand, beside its yardsticks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kernels.tools.native import Library, Packed
from kernels.tools.reference import random_weights
from kernels.tools.timing import seconds

ROTATED_BYTES = 256 << 20  # several times any L2
GROUP = 16
Peers = dict[str, Callable[[int, int, int, int], list[Callable[[], Any]]]]


def copies(library: Library, n: int, k: int) -> list[Packed]:
    """Packed weights, as many as make ROTATED_BYTES."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    count = min(40, max(2, ROTATED_BYTES // (n * k * 9 // 16) + 1))
    made = []
    for _ in range(count):
        w = random_weights(n, k, GROUP, generator)
        made.append(library.pack(w.codes, w.scales, w.row_factor, GROUP))
    return made


def read_alone(library: Library, size: int, count: int) -> float:
    """Seconds to read `size` bytes by a kernel that does nothing else, launch included, `count` buffers in turn."""
    buffers = [torch.randint(0, 255, (size // 4,), dtype=torch.int32, device="cuda") for _ in range(count)]
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return min(seconds([partial(library.read, b, processors * g, sink) for b in buffers]) for g in (4, 8, 16))


def empty_launch(library: Library) -> float:
    """Seconds of a kernel that reads nothing, in a graph of such kernels: what any launch costs."""
    nothing = torch.empty(0, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    return seconds([partial(library.read, nothing, blocks, sink)] * 40)


def measure(
    library: Library, name: str, n: int, k: int, tokens: Sequence[int], read: float, empty: float, peers: Peers
) -> list[dict[str, Any]]:
    """One row per token count: our time, the alternatives' times, and the fraction of the read ceiling."""
    weights = copies(library, n, k)
    size = n * k * 9 / 16
    alone, floor = read_alone(library, int(size), len(weights)), empty + size / read
    scratch = torch.empty(n, k, dtype=torch.float16, device="cuda")
    dense = [torch.empty(n, k, dtype=torch.float16, device="cuda") for _ in range(min(len(weights), 4))]
    for w, d in zip(weights, dense, strict=False):
        library.dequantize(w, d)
    dequantize = seconds([partial(library.dequantize, w, scratch) for w in weights])
    rows = []
    for m in tokens:
        x = torch.randn(m, k, device="cuda").half()
        y = torch.empty(m, n, dtype=torch.float16, device="cuda")
        launches = [library.linear(x, w, y) for w in weights]
        ours = seconds(launches)

        unfused = seconds([partial(dequantize_then_multiply, library, w, scratch, x, y) for w in weights])
        cublas = seconds([partial(torch.mm, x, d.T, out=y) for d in dense])
        others = {f"{peer}_us": round(seconds(calls(m, n, k, len(weights))) * 1e6, 2) for peer, calls in peers.items()}
        rows.append(
            {
                "layer": name, "n": n, "k": k, "m": m,
                "variant": launches[0].shape.name, "blocks": launches[0].plan.blocks,
                "us": round(ours * 1e6, 2), "weight_gb_s": round(size / ours / 1e9, 1),
                "of_read": round(size / ours / read, 3), "read_alone_us": round(alone * 1e6, 2),
                "floor_us": round(floor * 1e6, 2),
                "dequantize_cublas_us": round(unfused * 1e6, 2), "speedup_over_it": round(unfused / ours, 2),
                "fp16_cublas_us": round(cublas * 1e6, 2), "speedup_over_fp16": round(cublas / ours, 2),
                "dequantize_us": round(dequantize * 1e6, 2),
                "dequantize_gb_s": round((size + 2 * n * k) / dequantize / 1e9, 1),
                **others,
            }
        )  # fmt: skip
    return rows


def memory_side(library: Library, name: str, n: int, k: int, read: float) -> list[dict[str, Any]]:
    """Times of the kernels without their arithmetic: what their way of reading allows."""
    weights, variants, rows = copies(library, n, k), library.variants(), []
    for variant, m in (("mma2", 1), ("mma8", 8)):
        x = torch.randn(m, k, device="cuda").half()
        y = torch.empty(m, n, dtype=torch.float16, device="cuda")
        launches = [library.linear(x, w, y, variant=variants[variant], memory_side=True) for w in weights]
        time_ = seconds(launches)
        rows.append(
            {
                "layer": name, "n": n, "k": k, "m": m, "variant": variant, "blocks": launches[0].plan.blocks,
                "us": round(time_ * 1e6, 2), "of_read": round(n * k * 9 / 16 / time_ / read, 3),
            }
        )  # fmt: skip
    return rows


def dequantize_then_multiply(
    library: Library, w: Packed, scratch: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> None:
    """The GEMM without a fused kernel."""
    library.dequantize(w, scratch)
    torch.mm(x, scratch.T, out=y)
