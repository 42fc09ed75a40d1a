"""Computes how fast two V100s decode a 32B NVFP4 model, from the kernels' machine code and stated costs of the rest.

    python -m perfmodel.dense_table --cuda-home DIR --measured docs/results/e2e-h200-32b-eager-DATE.json
        --graphs docs/results/e2e-h200-32b-fused-DATE.json --output F.json

Nothing here was run on a V100. A step of M sequences at tensor parallelism 2 is

    64 layers of (four GEMMs, attention, small kernels, two all-reduces) + lm_head + gathering logits + host

GEMMs           perfmodel/sass_model.py, from the sm_70 machine code
attention       perfmodel/attention_model.py, from the sm_70 machine code; divided by its ratio of predicted to measured
                time on an H200
small kernels   norms of heads with rotation and cache, and the gate: each as long as the shortest kernel in a graph
all-reduce      perfmodel/all_reduce_model.py: ours with addition and norm, over PCIe through host memory, over NVLink
                through peer memory
lm_head         float16, bound by reading
host            twice the time measured beside an H200, since the processors beside V100s are older. In graphs: the
                longest time that the GPU waits for the host (--graphs). Eager: a recorded step (--measured; at 16
                and 32 streams it includes the H200's own time)

In eager mode host and GPU overlap. The longer of two times counts: a step's launches, and a step in graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import AttentionLibrary
from perfmodel import attention_model
from perfmodel.all_reduce_model import NCCL, OURS, Nccl, Ours
from perfmodel.sass_model import GPUS, Model

LAYERS, HIDDEN, VOCABULARY = 64, 5120, 151936  # Qwen3-32B
RANKS = 2
PRODUCTS = ((5120, 5120), (5120, 4096), (25600, 5120), (5120, 12800))  # qkv, o, gate_up, down of one rank
HEADS = (64 // RANKS, 8 // RANKS, 128)  # query and key heads of one rank, head size
CONTEXT = 512  # tokens a sequence has in its cache
REFERENCE = {1: 18, 8: 95, 16: 130, 32: 140}  # the reference document's 2 x V100 16 GB PCIe, eager
GOAL = {1: 60, 8: 400, 16: 700, 32: 1000}  # in graphs
OLDER_HOST = 2  # stated: the host's work takes this much longer on a processor of the V100's time


@dataclass(frozen=True)
class Costs:
    """The stated costs, in seconds and bytes per second."""

    small_kernels: int = 2
    kernel_seconds: float = 3e-6
    attention_foretold: float = 0.85  # median of attention_model.py's over measured, on an H200
    lm_head_share: float = 0.96  # public measurement of a float16 matrix-vector product on a V100


def attention_seconds(
    model: attention_model.Model, costs: Costs, heads: tuple[int, int, int], sequences: int, context: int
) -> float:
    """A layer's attention on one rank, each sequence with `context` tokens in its cache; `heads`: query, key, size."""
    kernel = model.decode(heads, sequences, 1)
    foretold: float = attention_model.decode(model.gpu, kernel, heads, [context] * sequences)["us"]
    return foretold * 1e-6 / costs.attention_foretold


def step(
    model: Model,
    attention: attention_model.Model,
    ours: Ours,
    nccl: Nccl,
    costs: Costs,
    sequences: int,
    host_ms: float,
) -> dict[str, float]:
    """Milliseconds of each part of a step in graphs; `host_ms`: of those, the host's."""
    read = model.gpu.read_bytes_s
    products = sum(model.row(sequences, n, k)["us"] for n, k in PRODUCTS) * 1e-6
    reduced = 2 * sequences * HIDDEN
    parts = {
        "products": LAYERS * products,
        "attention": LAYERS * attention_seconds(attention, costs, HEADS, sequences, CONTEXT),
        "small_kernels": LAYERS * costs.small_kernels * costs.kernel_seconds,
        "all_reduce": LAYERS * 2 * ours.seconds_with_norm(reduced),
        "lm_head": 2 * VOCABULARY * HIDDEN / RANKS / (costs.lm_head_share * read),
        "gather_logits": nccl.seconds(2 * sequences * VOCABULARY // RANKS),
        "host": 1e-3 * host_ms,
    }
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items()}


def host_step_ms(measured: dict[str, Any], streams: int) -> float:
    """The recorded eager step on the machine measured. Raises ValueError."""
    wanted = ("kernels", False, True, streams)
    steps = [
        float(row["step_ms_median"])
        for row in measured["rows"]
        if (row["way"], row["graphs"], row["recorded"], row["streams"]) == wanted
    ]
    if not steps:
        raise ValueError(f"--measured: expected a row of recorded eager steps with {streams} streams, got none")
    return round(median(steps), 2)


def graph_host_ms(measured: dict[str, Any]) -> float:
    """How long the GPU waits for an older host in a step in graphs: the longest wait for any number of streams counts.

    Single ones are differences of two times as long as a step, and uncertain by as much as they are. Raises ValueError.
    """
    waits = [float(row["host_ms"]) for row in measured["beside"]]
    if not waits or max(waits) <= 0:
        raise ValueError(f"--graphs: expected times that graphs wait for the host, got {waits}")
    return round(OLDER_HOST * max(waits), 3)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens a second by streams, beside the reference document's."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "voltserve"
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for gpu in NCCL:
        own = [row for row in rows if row["gpu"] == gpu]
        streams = [row["streams"] for row in own]
        axes.plot(streams, [row["graphs_tokens_s"] for row in own], "-o", label=f"{gpu}, graphs")
        axes.plot(streams, [row["eager_older_host_tokens_s"] for row in own], "--o", label=f"{gpu}, eager, older host")
    axes.plot(list(REFERENCE), list(REFERENCE.values()), ":s", label="reference document, PCIe, eager")
    axes.set(
        xlabel="streams",
        ylabel="tokens per second",
        title="Qwen3-32B NVFP4 on two V100s (computed)",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(list(REFERENCE), [str(streams) for streams in REFERENCE])
    axes.minorticks_off()
    axes.set_yticks([20, 50, 100, 200, 500, 1000], ["20", "50", "100", "200", "500", "1000"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Prints the table, writes it and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-home", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    costs = Costs()
    measured = json.loads(arguments.measured.read_text())
    wait_ms = graph_host_ms(json.loads(arguments.graphs.read_text()))
    host_ms = {streams: host_step_ms(measured, streams) for streams in REFERENCE}
    rows = []
    for name, nccl in NCCL.items():
        model = Model(arguments.library, GPUS[name], arguments.cuda_home)
        attention = attention_model.Model(AttentionLibrary(arguments.library), model.functions, model.gpu)
        for sequences, reference in REFERENCE.items():
            parts = step(model, attention, OURS[name], nccl, costs, sequences, wait_ms)
            graphs_ms = sum(parts.values())
            # With NCCL's all-reduce, addition and norm are a kernel of their own.
            apart = nccl.seconds(2 * sequences * HIDDEN) + costs.kernel_seconds
            with_nccl_ms = graphs_ms - parts["all_reduce"] + 2e3 * LAYERS * apart
            eager_ms = max(graphs_ms, host_ms[sequences])
            older_ms = max(graphs_ms, OLDER_HOST * host_ms[sequences])
            row = {
                "gpu": name,
                "streams": sequences,
                "graphs_tokens_s": round(1e3 * sequences / graphs_ms, 1),
                "graphs_tokens_s_with_nccl": round(1e3 * sequences / with_nccl_ms, 1),
                "eager_tokens_s": round(1e3 * sequences / eager_ms, 1),
                "eager_older_host_tokens_s": round(1e3 * sequences / older_ms, 1),
                "reference_tokens_s": reference,
                "goal_tokens_s": GOAL[sequences],
                "graphs_ms": round(graphs_ms, 2),
                "parts_ms": parts,
            }
            rows.append(row)
            print(row)
    result = {
        "what": "decoding of Qwen3-32B in NVFP4 on two V100s at tensor parallelism 2",
        "provenance": "computed",
        "command": " ".join(sys.argv),
        "context_tokens": CONTEXT,
        "stated": asdict(costs),
        "all_reduce": {name: {"ours": asdict(OURS[name]), "nccl": asdict(nccl)} for name, nccl in NCCL.items()},
        "eager_host_ms": host_ms,
        "older_host": OLDER_HOST,
        "eager_host_source": str(arguments.measured),
        "graph_host_source": str(arguments.graphs),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, arguments.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
