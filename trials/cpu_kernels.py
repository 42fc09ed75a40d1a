"""GB/s of the CPU's NVFP4 kernels over matrices that no cache holds, beside the read ceiling."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trials.cpu_servers import ROOT

GROUP = 16
KERNEL_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 4096))
# SmolLM2-135M's layers, as engine/cpu/decoder.py has a decoding step run: all products in one call.
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 1536, 9, 3, 64
CONTEXT, PAGE = 64, 32


def kernels() -> dict[str, object]:
    """GB/s of the NVFP4 product over one token, of matrices too many for the caches, and the read ceiling."""
    import torch
    import voltserve_kernels

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "read_ceiling"
        source = ROOT / "kernels" / "tools" / "read_ceiling.cpp"
        subprocess.run(["g++", "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
        output = subprocess.run([program, str(os.cpu_count())], check=True, capture_output=True, text=True).stdout
    ceiling = float(output)
    rows = []
    for n, k in KERNEL_SHAPES:
        copies = (256 << 20) // weight_bytes(n, k) + 1
        first = random_matrix(n, k)
        weights = [first, *([part.clone() for part in first] for _ in range(copies - 1))]
        x = torch.randn(1, k)

        def products(weights: list[list[Any]] = weights, x: Any = x) -> None:
            for packed, scales, factor in weights:
                torch.ops.voltserve.nvfp4_linear(x, packed, scales, factor, GROUP)

        rows.append({"n": n, "k": k, **rate(products, copies * weight_bytes(n, k), ceiling)})
    step, size = decoder_step()
    return {
        "read_ceiling_gb_per_s": ceiling,
        "instruction_set": voltserve_kernels.cpu_instruction_sets()[0],
        "m": 1,
        "nvfp4_linear": rows,
        "decoder_step": {"layers": LAYERS, "weight_bytes": size, **rate(step, size, ceiling)},
    }


def weight_bytes(n: int, k: int) -> int:
    """Of a matrix: codes and block scales."""
    return n * k // 2 + n * k // GROUP


def random_matrix(n: int, k: int) -> list[Any]:
    """A matrix as nvfp4_linear takes it: packed codes, scales, row factors."""
    import torch

    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0x30, (n, k // GROUP), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return [*torch.ops.voltserve.nvfp4_pack(codes, scales, GROUP), torch.full((n,), 0.1)]


def decoder_step() -> tuple[Callable[[], object], int]:
    """One token through all layers of SmolLM2-135M's shape, and the bytes of their weights."""
    import torch

    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = ((rows, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    norm, none = torch.ones(HIDDEN), torch.empty(0)
    tensors = []
    for _ in range(LAYERS):
        qkv, out, gate_up, down = (random_matrix(*shape) for shape in shapes)
        tensors += [norm, *qkv, none, none, none, *out, norm, *gate_up, *down]
    made = torch.ops.voltserve.decoder_make(tensors, norm, GROUP, HEADS, KV_HEADS, 1e-5, HEAD_DIM**-0.5)
    pages = CONTEXT // PAGE
    caches = [torch.zeros(2, pages, KV_HEADS, PAGE, HEAD_DIM) for _ in range(LAYERS)]
    position = torch.tensor([CONTEXT - 1])
    batch = (torch.arange(pages, dtype=torch.int32)[None], torch.tensor([0, 1]).int(), torch.tensor([CONTEXT]).int())
    arguments = (made, torch.randn(1, HIDDEN), position, torch.ones(CONTEXT, HEAD_DIM), caches, position, *batch)
    size = LAYERS * sum(weight_bytes(*shape) for shape in shapes)
    return lambda: torch.ops.voltserve.decoder_step(*arguments), size


def rate(work: Callable[[], object], size: int, ceiling: float) -> dict[str, float]:
    """GB/s of the fastest of some runs that read `size` bytes each."""
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    speed = size / min(seconds) / 1e9
    return {"gb_per_s": round(speed, 2), "of_ceiling": round(speed / ceiling, 3)}
