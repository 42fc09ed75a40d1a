"""Draws the results of scripts/bench_gpu.py and sass_model.py as an SVG beside each.

    python -m kernels.tools.plot RESULT.json ...

Measured: each layer's share of the read ceiling, and that of a kernel that only reads the same bytes. Beside them the
speed-up over other ways to compute the same. Computed: the share of the read ceiling and the TFLOP/s by tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "voltserve",  # the same plot is the same text every time
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
OTHERS = {
    "dequantize_cublas_us": "dequantize + cuBLAS",
    "fp16_cublas_us": "cuBLAS on fp16",
    "tinygemm_int4_us": "tinygemm int4 (torch)",
    "vllm_awq_triton_us": "AWQ Triton (vLLM)",
}
Row = dict[str, Any]


def megabytes(row: Row) -> float:
    """The bytes of a layer's weights, at 4.5 bits each."""
    return float(row["n"] * row["k"] * 9 / 16 / 1e6)


def by_size(rows: list[Row], m: int) -> list[Row]:
    """The rows for m tokens, smallest weight first."""
    return sorted((row for row in rows if row["m"] == m), key=megabytes)


def measured(result: dict[str, Any]) -> Figure:
    """Two plots over the size of the weight."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows, read = result["rows"], result["read_gb_s"] * 1e9
    alone = by_size(rows, 1)
    sizes = [megabytes(row) for row in alone]
    shares = [100 * megabytes(row) * 1e6 / (row["read_alone_us"] * 1e-6) / read for row in alone]
    left.plot(sizes, shares, color="black", linestyle=":", label="a kernel that only reads")
    for m, marker in ((1, "o"), (4, "s"), (8, "^"), (16, "v")):
        chosen = by_size(rows, m)
        left.plot(sizes, [100 * row["of_read"] for row in chosen], marker=marker, label=f"M = {m}")
    left.set(title=f"{result['device']}: % of {result['read_gb_s']:.0f} GB/s", ylim=(0, 100))
    for name, label in OTHERS.items():
        if name in alone[0]:
            right.plot(sizes, [row[name] / row["us"] for row in alone], marker="o", label=label)
    right.axhline(1, color="black", linewidth=0.8)
    right.set(title="M = 1: time of others over ours", yscale="log", yticks=[1, 2, 5, 10, 20])
    right.yaxis.set_major_formatter("{x:.0f}x")
    right.yaxis.set_minor_formatter("")
    for axes in (left, right):
        axes.set(xlabel="MB of weights in the layer", xscale="log", xticks=[10, 20, 50, 100])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_formatter("")
        axes.legend()
    return figure


def computed(result: dict[str, Any]) -> Figure:
    """Two plots over the tokens, one line per layer of Qwen3-32B at TP2."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in result["rows"] if row["layer"].startswith("Qwen3-32B TP2")]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        chosen = [row for row in rows if row["layer"] == layer]
        tokens = [row["m"] for row in chosen]
        fused = [row for row in chosen if row["variant"] != "cuBLAS"]
        left.plot([row["m"] for row in fused], [100 * row["of_read"] for row in fused], marker="o", label=layer)
        right.plot(tokens, [row["tflop_s"] for row in chosen], marker="o", label=layer)
    gpu = result["gpu"]
    left.set(title=f"{gpu['name']}, computed: % of {gpu['read_bytes_s'] / 1e9:.0f} GB/s", ylim=(0, 100))
    right.set(title="TFLOP/s, an upper bound", ylim=(0, None))
    for axes in (left, right):
        axes.set(xlabel="tokens", xscale="log", xticks=[1, 8, 64, 1024])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_formatter("")
    left.legend()
    return figure


def main() -> None:
    """Writes NAME.svg for each NAME.json."""
    for path in map(Path, sys.argv[1:]):
        result = json.loads(path.read_text())
        with mpl.rc_context(STYLE):
            figure = measured(result) if result["provenance"] == "measured" else computed(result)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
