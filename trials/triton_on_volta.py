"""Triton's kernels compiled for sm_70 without a V100, and what the compiler made of each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with which vLLM does not ask for a GPU before it imports Triton

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

SHARED_MEMORY, PROCESSORS = 96 * 1024, 80  # bytes of one of a V100's processors; how many it has
SETTINGS = ("BT", "BK", "BV", "BLOCK_M", "BLOCK_N", "BLOCK_SIZE", "TILE_SIZE", "num_warps", "num_stages")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 8, 24, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 12, 2, 256, 16


class Volta:
    """What Triton asks of a driver, for a V100 that is not there."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": PROCESSORS}
    )

    def get_current_target(self) -> GPUTarget:
        """Compute capability 7.0, warps of 32."""
        return GPUTarget("cuda", 70, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


class Recorder:
    """Compiles in place of launching; `rows` has one entry per kernel and configuration."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.used_for = ""
        self._seen: set[tuple[str, str]] = set()
        compile_only = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._record(function, lambda: compile_only(function, *args, grid=grid, warmup=True, **kwargs), kwargs)

        def tune(tuner: Any, *args: Any, **kwargs: Any) -> None:
            most_warps: dict[str, Any] = {}  # by block sizes: fewer warps only spill more
            for config in sorted(tuner.configs, key=lambda config: config.num_warps):
                most_warps[str(config.kwargs)] = config
            for config in most_warps.values():
                tuner.fn.run(*args, **{**kwargs, **config.all_kwargs()})

        JITFunction.run = run
        Autotuner.run = tune

    def _record(self, function: Any, compiled: Callable[[], Any], options: dict[str, Any]) -> None:
        name = function.fn.__name__
        settings = {key: value for key, value in options.items() if key in SETTINGS}
        # Of stages a V100 knows nothing: it copies to shared memory through registers.
        key = (name, json.dumps({key: value for key, value in settings.items() if key != "num_stages"}, default=str))
        if key in self._seen:
            return
        self._seen.add(key)
        row: dict[str, Any] = {"kernel": name, "for": self.used_for, "settings": settings}
        try:
            row |= describe(compiled())
        except Exception as error:  # whatever stops the compiler is the finding
            row["fails"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
        self.rows.append(row)
        print(json.dumps(row, default=str), flush=True)


def describe(kernel: Any) -> dict[str, Any]:
    """What the compiler made of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(kernel.asm["ptx"])
        command = [str(TOOLS / "ptxas"), "-v", "--gpu-name=sm_70", str(ptx), "-o", str(cubin)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        command = [str(TOOLS / "nvdisasm"), "-c", str(cubin)]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found[1]) if found else 0

    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9.]+)", sass)
    shared = kernel.metadata.shared
    made = {
        "registers": number(r"Used (\d+) registers"),
        "spilled_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared_bytes": shared,
        "dots": len(re.findall(r"\btt\.dot\b", kernel.asm["ttir"])),
        "ffma": sum(name.startswith("FFMA") for name in code),
        "hmma": sum(name.startswith("HMMA") for name in code),
        "instructions": len(code),
    }
    if shared > SHARED_MEMORY:
        made["fails"] = f"needs {shared} bytes of shared memory, a V100's processor has {SHARED_MEMORY}"
    return made


def calls() -> dict[str, Callable[[], Any]]:
    """What vLLM calls for a step of this model, by the phase in which it does."""
    from vllm.model_executor.layers.fla.ops import (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule_packed_decode,
        fused_sigmoid_gating_delta_rule_update,
        layernorm_guard,
    )
    from vllm.model_executor.layers.mamba.gdn_linear_attn import fused_gdn_gating
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    layernorm_guard.num_compute_units = lambda *_: PROCESSORS
    tokens = 128
    x, weight, a, b = half(tokens, CHANNELS), half(CHANNELS, TAPS), half(tokens, VALUE_HEADS), half(tokens, VALUE_HEADS)
    conv_state = half(4, TAPS - 1, CHANNELS).transpose(1, 2)
    state = torch.zeros(4, VALUE_HEADS, DIM, DIM)
    a_log, dt_bias = torch.zeros(VALUE_HEADS), half(VALUE_HEADS)
    q, k, v = half(1, tokens, KEY_HEADS, DIM), half(1, tokens, KEY_HEADS, DIM), half(1, tokens, VALUE_HEADS, DIM)
    starts, slots, continued = integers(0, 100, tokens), integers(0, 1), torch.tensor([False, True])
    g, beta = torch.zeros(1, tokens, VALUE_HEADS), half(1, tokens, VALUE_HEADS)
    cache = half(64, BLOCK, KV_HEADS, HEAD_DIM)
    query, keys = half(tokens, QUERY_HEADS, HEAD_DIM), half(tokens, KV_HEADS, HEAD_DIM)
    table, lengths = torch.zeros(2, 32, dtype=torch.int32), integers(100, 28)

    def attention(attended: torch.Tensor, ends: torch.Tensor, longest: int) -> None:
        segments = torch.zeros(len(attended), QUERY_HEADS, 16, HEAD_DIM)
        sums = torch.zeros(len(attended), QUERY_HEADS, 16)
        unified_attention(
            attended,
            cache,
            cache,
            torch.empty_like(attended),
            ends,
            longest,
            lengths,
            100,
            HEAD_DIM**-0.5,
            True,
            (-1, -1),
            table,
            0,
            None,
            None,
            None,
            128,
            16,
            segments,
            sums,
            sums,
        )

    def delta_rule_of_drafts() -> None:
        fused_sigmoid_gating_delta_rule_update(
            A_log=a_log,
            a=a,
            b=b,
            dt_bias=dt_bias,
            q=q,
            k=k,
            v=v,
            initial_state=state,
            cu_seqlens=starts,
            ssm_state_indices=slots[:, None].repeat(1, 128).contiguous(),
            num_accepted_tokens=integers(1, 1),
            use_qk_l2norm_in_kernel=True,
        )

    one = slice(0, 2)
    return {
        "decoding: convolution": lambda: causal_conv1d_update(
            x[one], conv_state, weight, None, "silu", conv_state_indices=slots
        ),
        "decoding: delta rule": lambda: fused_recurrent_gated_delta_rule_packed_decode(
            x[one],
            a[one],
            b[one],
            a_log,
            dt_bias,
            DIM**-0.5,
            state,
            half(2, 1, VALUE_HEADS, DIM),
            slots,
            use_qk_l2norm_in_kernel=True,
        ),
        "prefill: convolution": lambda: causal_conv1d_fn(
            x.T, weight, None, conv_state, starts, cache_indices=slots, has_initial_state=continued, activation="silu"
        ),
        "prefill: gates": lambda: fused_gdn_gating(a_log, a, b, dt_bias),
        "prefill: delta rule": lambda: chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state[:2],
            output_final_state=True,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=True,
        ),
        "speculative decoding: delta rule": delta_rule_of_drafts,
        "every step: gated norm": lambda: layernorm_guard.rmsnorm_fn(
            half(tokens * VALUE_HEADS, DIM), half(DIM), None, z=half(tokens * VALUE_HEADS, DIM)
        ),
        "every step: rotary positions": lambda: triton_mrope(
            query.view(tokens, -1),
            keys.view(tokens, -1),
            half(3, tokens, 32),
            half(3, tokens, 32),
            [11, 11, 10],
            HEAD_DIM,
            64,
            True,
        ),
        "every step: cache of attention": lambda: triton_reshape_and_cache_flash(
            keys, keys, cache, cache, torch.zeros(tokens, dtype=torch.int64), "auto", torch.ones(1), torch.ones(1)
        ),
        "decoding: attention": lambda: attention(query[one], integers(0, 1, 2), 1),
        "prefill: attention": lambda: attention(query, starts, 100),
    }
