"""vLLM's Triton attention without vLLM: the backend that a V100 would have without ours, for comparison.

Its files are read from an installed vLLM, or from vLLM's Python files alone. What they import of vLLM has stand-ins
here. They therefore run with any torch, on a machine where vLLM itself does not work.
"""

from __future__ import annotations

import logging
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

from kernels.tools import vllm_file

FILE = Path("v1/attention/ops/triton_unified_attention.py")
HELPERS = Path("v1/attention/ops/triton_attention_helpers.py")
SEGMENTS = 16  # of a sequence in decoding, as vLLM's TritonAttentionMetadataBuilder has it


class CacheMode(IntEnum):
    """The modes of vLLM's cache that the kernel's launcher asks for; ours is always the first."""

    NONE = 0
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def load(vllm: Path) -> Any:
    """The module of vLLM's kernels. `vllm`: its package folder. Raises FileNotFoundError without the file in it."""
    import torch
    import triton
    import triton.language

    stubs: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": CacheMode},
    }
    stubs["vllm." + ".".join(HELPERS.with_suffix("").parts)] = vars(vllm_file.load(vllm, HELPERS, stubs))
    return vllm_file.load(vllm, FILE, stubs)


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


def compile_prefill(module: Any, head_dim: int, group: int) -> tuple[bytes, int, int, int]:
    """(machine code for sm_70, warps, rows, cached positions per iteration) of the kernel for prompts; needs no GPU.

    The arguments that select the code are those of `unified_attention` for a plain causal layer over blocks of 16.
    Pointers and strides are multiples of 16, as Triton finds them at a launch. `group`: query heads per key head, up to
    16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, rows, positions = module.kernel_unified_attention, 16, 32
    constants: dict[str, Any] = {
        parameter.name: parameter.default for parameter in kernel.params if parameter.has_default
    }
    constants |= {
        "num_query_heads": group, "num_queries_per_kv": group, "BLOCK_SIZE": 16, "TILE_SIZE": positions,
        "HEAD_SIZE": head_dim, "HEAD_SIZE_PADDED": 1 << (head_dim - 1).bit_length(), "BLOCK_Q": rows // group,
        "BLOCK_M": rows, "stride_k_cache_3": 1, "stride_v_cache_3": 1, "SLIDING_WINDOW": 0, "MAX_MM_RANGES": 0,
        "R_SWA_WINDOW": 0, "NUM_SEGMENTS_PER_SEQ": 1, "IS_3D": False, "out_scale": 1.0, "softcap": 0.0,
    }  # fmt: skip
    constants |= dict.fromkeys(("sink_ptr", "alibi_slopes_ptr", "qq_bias_ptr", "mm_prefix_range_ptr", "q_scale"))
    constants |= dict.fromkeys(("per_seq_causal_ptr", "rswa_prefix_lens_ptr"))
    constants |= {name: name == "USE_CAUSAL" for name in kernel.arg_names if name.startswith("USE_")}
    halves = ("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr")
    types = dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "query_start_len_ptr"), "*i32")
    types |= dict.fromkeys(halves, "*fp16") | {"k_scale": "*fp32", "v_scale": "*fp32", "scale": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in kernel.arg_names}
    signature["num_seqs"] = "i32"
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or "stride" in name]
    known = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned if (i,) not in known}
    source = ASTSource(kernel, signature, known, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 70, 32))
    return compiled.asm["cubin"], compiled.metadata.num_warps, rows, positions
