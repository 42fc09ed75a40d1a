"""Public 4-bit GEMMs to compare with, on random weights of their own formats. Their results are not checked.

tinygemm is torch's `_weight_int4pack_mm`: bf16 activations, groups of 32, 5 bits per weight against NVFP4's 4.5. AWQ is
vLLM's Triton kernel: fp16 activations, groups of 128. Its file is read from an installed vLLM, or from vLLM's Python
files alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.tools import vllm_file

AWQ_FILE = Path("model_executor/layers/quantization/awq_triton.py")
TINYGEMM_GROUP, TINYGEMM_INNER_TILES = 32, 8
AWQ_GROUP, AWQ_SPLIT_K = 128, 8  # as vLLM calls it
Launch = Callable[[], Any]


def tinygemm(m: int, n: int, k: int, copies: int) -> list[Launch]:
    """Calls of torch's int4 GEMM with x [m, k], one per copy of the weight [n, k]."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    calls: list[Launch] = []
    for _ in range(copies):
        codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, TINYGEMM_INNER_TILES)
        scales = torch.randn(k // TINYGEMM_GROUP, n, 2, device="cuda", dtype=torch.bfloat16)
        calls.append(partial(torch.ops.aten._weight_int4pack_mm, x, packed, TINYGEMM_GROUP, scales))
    return calls


def awq(vllm: Path) -> Callable[[int, int, int, int], list[Launch]]:
    """As tinygemm(), for AWQ. `vllm`: its package folder. Raises FileNotFoundError without the kernel's file in it."""
    import triton
    import triton.language

    module = vllm_file.load(vllm, AWQ_FILE, {"vllm.triton_utils": {"triton": triton, "tl": triton.language}})

    def calls(m: int, n: int, k: int, copies: int) -> list[Launch]:
        x = torch.randn(m, k, device="cuda").half()
        made: list[Launch] = []
        for _ in range(copies):
            random = torch.randint(-(2**31), 2**31 - 1, (k + k // AWQ_GROUP, n // 8), device="cuda", dtype=torch.int32)
            scales = torch.randn(k // AWQ_GROUP, n, device="cuda").half()
            codes, zeros = random[:k], random[k:]
            made.append(partial(module.awq_gemm_triton, x, codes, scales, zeros, AWQ_SPLIT_K))
        return made

    return calls
