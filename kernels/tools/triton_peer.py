"""vLLM's Triton attention, on its own: the backend that a V100 has without ours, to compare with.

Its file is read from an installed vLLM (or its Python files alone); what it imports of vLLM is four names, which are
stood in for, so that it runs beside any torch and needs no vLLM that works on the machine.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

FILE = Path("v1/attention/ops/triton_unified_attention.py")
SEGMENTS = 16  # of a sequence in decoding, as vLLM's TritonAttentionMetadataBuilder has it


def load(vllm: Path) -> Any:
    """The module of vLLM's kernels. `vllm`: its package folder. Raises FileNotFoundError without the file in it."""
    import torch
    import triton
    import triton.language

    path = vllm / FILE
    if not path.is_file():
        raise FileNotFoundError(f"vllm: expected {FILE} in {vllm}, found none")
    stubs = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
    }
    before = {name: sys.modules.get(name) for name in ("vllm", *stubs)}
    sys.modules["vllm"] = parent = types.ModuleType("vllm")
    for name, values in stubs.items():
        stub = sys.modules[name] = types.ModuleType(name)
        vars(stub).update(values)
        setattr(parent, name.split(".")[1], stub)
    try:
        spec = importlib.util.spec_from_file_location("voltserve_triton_peer", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"vllm: expected a Python file at {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, value in before.items():
            if value is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = value
    return module


def launcher(
    module: Any,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    query_start: Any,
    seq_lens: Any,
    max_query_len: int,
    max_seq_len: int,
    out: Any,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Any:
    """A callable that launches it as vLLM's TritonAttentionImpl does, decoding buffers included."""
    import torch

    _, q_heads, head_dim = q.shape
    padded = 1 << (head_dim - 1).bit_length()
    threshold = 128 // k_cache.shape[2]
    buffers = [torch.empty(threshold, q_heads, SEGMENTS, *last, device=q.device) for last in ((padded,), (), ())]
    ones = torch.ones(1, device=q.device).expand(seq_lens.shape[0], k_cache.shape[2])

    def launch() -> None:
        module.unified_attention(
            q=q, k=k_cache, v=v_cache, out=out, cu_seqlens_q=query_start, max_seqlen_q=max_query_len,
            seqused_k=seq_lens, max_seqlen_k=max_seq_len, softmax_scale=scale, causal=True,
            window_size=(window - 1, 0) if window else (-1, -1), block_table=block_table, softcap=soft_cap,
            q_descale=None, k_descale=ones, v_descale=ones, seq_threshold_3D=threshold,
            num_par_softmax_segments=SEGMENTS, softmax_segm_output=buffers[0], softmax_segm_max=buffers[1],
            softmax_segm_expsum=buffers[2],
        )  # fmt: skip

    return launch
