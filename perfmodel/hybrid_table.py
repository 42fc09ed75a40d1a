"""Computes whether Qwen3.8-27B-QUASAR-NVFP4 fits two V100 16 GB, and how fast it decodes there.

    python -m perfmodel.hybrid_table --cuda-home DIR --graphs docs/results/e2e-h200-32b-fused-DATE.json
        --output docs/results/v100-27b-computed-DATE.json

Nothing here was run on a V100. Memory is `voltserve plan`'s, text only. A step is computed as in
perfmodel/dense_table.py, with the same links and costs. A Gated DeltaNet layer adds

    delta rule     reading and writing 24 states of 128 x 128 float32 per sequence, at a share of the copy rate, and a
                   fixed time; both are fitted to the times measured on an H200 (--measured)
    convolution    one short kernel

Prompts: chains of dependent instructions bound the delta rule's scan. Its time is its cycles on an H200 at the V100's
clock. The linear layers run at the rate that cuBLAS reaches.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import AttentionLibrary
from lookalikes.public_models import public_model
from perfmodel import attention_model
from perfmodel.all_reduce_model import NCCL, OURS, Nccl, Ours
from perfmodel.dense_table import Costs, attention_seconds, graph_host_ms
from perfmodel.sass_model import GPUS, Gpu, Model
from server.plan.cache import GPU_BLOCK
from server.plan.memory import Device, Run, gib, make_plan
from server.plan.model import describe, text_only
from server.plan.settings import VISIBLE_SHARE
from server.plan.weights import Split
from server.units import GIB

RANKS = 2
LINEAR_LAYERS, FULL_LAYERS, HIDDEN, VOCABULARY = 48, 16, 5120, 248320
MLP = ((17408, 5120), (5120, 8704))  # gate_up, down of one rank
LINEAR = ((8192, 5120), (48, 5120), (5120, 3072), *MLP)  # in_proj_qkvz, in_proj_ba, out_proj
FULL = ((7168, 5120), (5120, 3072), *MLP)  # qkv with the queries' gate, o
HEADS = (24 // RANKS, 4 // RANKS, 256)  # query and key heads of one rank, head size
STATE_BYTES = 2 * 4 * 24 * 128 * 128  # read and written, per sequence, layer and rank
PROMPT = 2048  # tokens of a step
STREAMS, CONTEXTS = (1, 8, 16, 32), (3072, 8192, 32768)
ANCHORS = {
    "2 x V100 16 GB SXM2, no MTP, 3K context (ninfer fork, its own claim)": 39.6,
    "2 x V100 32 GB (1Cat-vLLM 1.5.1, its own claim)": 52.7,
    "2 x V100 32 GB (v100-skinny, its own claim)": 57.3,
}


@dataclass(frozen=True)
class HybridCosts(Costs):
    """The stated costs beyond those of dense_table.py; kernels per layer, in graphs."""

    # Two norms of 3 (add, norm, to float16), gated norm, SiLU, zeros, convolution; copies of both gates, z and output.
    linear_small_kernels: int = 14
    # Two norms, norms of q and k, positions of 3, cache, gate of 2, SiLU; copies of q, gate and output.
    full_small_kernels: int = 22
    copy_bytes_s: float = 822e9  # published for a V100; read and written bytes both counted
    h200_copy_bytes_s: float = 4.3e12
    h200_clock_hz: float = 1.98e9
    cublas_flop_s: float = 95e12


def fitted(measured: dict[str, Any], costs: HybridCosts) -> tuple[float, float]:
    """(fixed seconds, share of the copy rate) of a decoding delta rule, through its times at 8 and 32 sequences."""
    times = {
        row["requests"]: row["microseconds"] * 1e-6
        for row in measured["times"]
        if row["op"] == "gated_delta_rule" and row["tokens_each"] == 1
    }
    slope = (times[32] - times[8]) / 24
    return times[8] - 8 * slope, STATE_BYTES / slope / costs.h200_copy_bytes_s


def step(
    model: Model,
    attention: attention_model.Model,
    ours: Ours,
    nccl: Nccl,
    costs: HybridCosts,
    fit: tuple[float, float],
    sequences: int,
    context: int,
    host_ms: float,
) -> Any:
    """Milliseconds of each part of a step in graphs."""
    read = model.gpu.read_bytes_s

    def products(shapes: tuple[tuple[int, int], ...]) -> float:
        return float(sum(model.row(sequences, n, k)["us"] for n, k in shapes)) * 1e-6

    rule = fit[0] + sequences * STATE_BYTES / (fit[1] * costs.copy_bytes_s)
    small = LINEAR_LAYERS * costs.linear_small_kernels + FULL_LAYERS * costs.full_small_kernels
    parts = {
        "products": LINEAR_LAYERS * products(LINEAR) + FULL_LAYERS * products(FULL),
        "delta_rule": LINEAR_LAYERS * rule,
        "attention": FULL_LAYERS * attention_seconds(attention, costs, HEADS, sequences, context),
        "small_kernels": small * costs.kernel_seconds,
        "all_reduce": 2 * (LINEAR_LAYERS + FULL_LAYERS) * ours.seconds(2 * sequences * HIDDEN),
        "lm_head": 2 * VOCABULARY * HIDDEN / RANKS / (costs.lm_head_share * read),
        "gather_logits": nccl.seconds(2 * sequences * VOCABULARY // RANKS),
        "host": 1e-3 * host_ms,
    }
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items()}


def prompt_share(gpu: Gpu, measured: dict[str, Any], costs: HybridCosts) -> dict[str, float]:
    """Milliseconds of a step of PROMPT tokens of one sequence, on one rank."""
    (scan,) = (
        row["microseconds"]
        for row in measured["times"]
        if (row["op"], row["requests"], row["tokens_each"]) == ("gated_delta_rule", 1, PROMPT)
    )
    weights = LINEAR_LAYERS * sum(n * k for n, k in LINEAR) + FULL_LAYERS * sum(n * k for n, k in FULL)
    return {
        "tokens": PROMPT,
        "delta_rule_ms": round(LINEAR_LAYERS * scan * 1e-3 * costs.h200_clock_hz / gpu.clock_hz, 1),
        "linear_layers_ms": round(1e3 * 2 * PROMPT * weights / costs.cublas_flop_s, 1),
    }


def memory(length: int, sequences: int) -> dict[str, Any]:
    """`voltserve plan` on one of two 16 GB cards, text only."""
    run = Run(
        length=length, sequences=sequences, batched=PROMPT, in_flight=2 * PROMPT, utilization=0.9, dtype_bytes=2,
        embedding_bytes=2, cache_dtype_bytes=2, form="packed", block_size=GPU_BLOCK,
    )  # fmt: skip
    model = text_only(describe(*public_model("27B"), "config.json"))
    plan = make_plan(model, Device("gpu", int(16 * GIB * VISIBLE_SHARE)), run, Split(RANKS))
    return {
        "max_model_len": length,
        "max_num_seqs": sequences,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "parts": {item.name: gib(item.bytes) for item in plan.items},
        "cache": gib(plan.cache_bytes),
        "cache_tokens": plan.tokens,
        "sequences_of_max_model_len": plan.together,
        "longest_for_max_num_seqs": plan.longest,
        "left_out": gib(model.left_out_bytes),
    }


def main() -> None:
    """Prints both tables and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-home", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--measured", type=Path, default=Path("docs/results/gdn-h200-2026-11-30.json"))
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    costs = HybridCosts()
    measured = json.loads(arguments.measured.read_text())
    host_ms = graph_host_ms(json.loads(arguments.graphs.read_text()))
    fit = fitted(measured, costs)
    fits = [memory(length, sequences) for length, sequences in ((8192, 8), (32768, 1), (32768, 4))]
    rows, prompts = [], {}
    for name, nccl in NCCL.items():
        model = Model(arguments.library, GPUS[name], arguments.cuda_home)
        attention = attention_model.Model(AttentionLibrary(arguments.library), model.functions, model.gpu)
        prompts[name] = prompt_share(model.gpu, measured, costs)
        for sequences, context in [(1, context) for context in CONTEXTS] + [(many, 512) for many in STREAMS[1:]]:
            parts = step(model, attention, OURS[name], nccl, costs, fit, sequences, context, host_ms)
            total = sum(parts.values())
            row = {"gpu": name, "streams": sequences, "context": context, "graphs_ms": round(total, 2)}
            rows.append(row | {"graphs_tokens_s": round(1e3 * sequences / total, 1), "parts_ms": parts})
            print(rows[-1])
    for one in fits:
        print(one)
    print(prompts)
    result = {
        "what": "Qwen3.8-27B-QUASAR-NVFP4 on two V100 16 GB at tensor parallelism 2, text only, without MTP",
        "provenance": "computed",
        "command": " ".join(sys.argv),
        "stated": asdict(costs),
        "all_reduce": {name: {"ours": asdict(OURS[name]), "nccl": asdict(nccl)} for name, nccl in NCCL.items()},
        "delta_rule_fitted_to_h200": {"fixed_us": round(fit[0] * 1e6, 2), "of_copy": round(fit[1], 3)},
        "graph_host_source": str(arguments.graphs),
        "anchors_tokens_s": ANCHORS,
        "memory": fits,
        "decoding": rows,
        "prompt": prompts,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
