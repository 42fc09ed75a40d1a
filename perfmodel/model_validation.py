"""Fits sass_model.py's constants to half of what an H200 measured and states the error on the other half.

    python -m perfmodel.model_validation --bench BENCH.json --cuda-home DIR --output docs/results/NAME.json

BENCH.json is a result of scripts/bench_gpu.py with build/cuda-80-90/libvoltserve_cuda.so. Each half is one model's
layers. The constants are fitted to Qwen3.8-27B's and tested on Qwen3-32B's, which have other shapes. The fit is the
triple of a grid with the smallest mean square of log(predicted / measured).

The fit uses M <= 8 only. With more tokens registers leave two warps per scheduler, and the model has no latencies.
Those points are reported apart, with the same constants.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perfmodel.sass_model import FITTED, GPUS, Constants, Model

FITTED_TO, WITHIN, MOST_TOKENS = "Qwen3.8-27B", 0.25, 8
LIBRARY = Path("build/cuda-80-90/libvoltserve_cuda.so")
GRID = [
    Constants(fixed / 1e7, efficiency / 100, once / 20)
    for fixed, efficiency, once in itertools.product(range(20, 61, 2), range(40, 101, 4), range(4, 21, 2))
]
ROLES = ("fitted_to", "held_out", "not_covered")
Point = dict[str, Any]


def points(bench: dict[str, Any]) -> list[Point]:
    """Every time that a fused kernel was measured for: layer, m, n, k, us, memory_side."""
    names = ("layer", "m", "n", "k", "us")
    rows = [(False, row) for row in bench["rows"]] + [(True, row) for row in bench["memory_side"]]
    return [{**{name: row[name] for name in names}, "memory_side": side} for side, row in rows]


def ratio(model: Model, point: Point, constants: Constants) -> float:
    """Predicted over measured."""
    seconds = model.predict(
        point["m"], point["n"], point["k"], memory_side=point["memory_side"], constants=constants
    )[2].seconds  # fmt: skip
    return seconds * 1e6 / float(point["us"])


def spread(model: Model, chosen: list[Point], constants: Constants) -> float:
    """The mean square of log(predicted / measured)."""
    return sum(math.log(ratio(model, point, constants)) ** 2 for point in chosen) / len(chosen)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How well a set of points was predicted."""
    ratios = [row["predicted_of_measured"] for row in rows]
    return {
        "points": len(ratios),
        "within_25_percent": sum(abs(r - 1) <= WITHIN for r in ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "mean_absolute_error": round(sum(abs(r - 1) for r in ratios) / len(ratios), 3),
    }


def main() -> None:
    """Fits, tests, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--cuda-home", type=Path, required=True, help="what scripts/fetch_nvcc.sh prints")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    model = Model(arguments.library, GPUS["h200"], arguments.cuda_home)
    measured = points(json.loads(arguments.bench.read_text()))
    covered = [point for point in measured if point["m"] <= MOST_TOKENS]
    fitted_to = [point for point in covered if point["layer"].startswith(FITTED_TO)]
    best = min(GRID, key=lambda constants: spread(model, fitted_to, constants))

    def role(point: Point) -> str:
        return "fitted_to" if point in fitted_to else "held_out" if point in covered else "not_covered"

    rows = [
        {**point, "role": role(point), "predicted_of_measured": round(ratio(model, point, best), 3)}
        for point in measured
    ]
    result = {
        "what": "time of the fused kernels on an H200: predicted from their machine code, against measured",
        "provenance": "computed",
        "command": " ".join(sys.argv),
        "bench": str(arguments.bench),
        "constants": asdict(best),
        "constants_in_use": asdict(FITTED),
        **{kind: summary([row for row in rows if row["role"] == kind]) for kind in ROLES},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if best != FITTED:
        print(f"FITTED in perfmodel/sass_model.py is {FITTED}: expected {best}", file=sys.stderr)


if __name__ == "__main__":
    main()
