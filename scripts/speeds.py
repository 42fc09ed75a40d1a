"""configs/speeds.yaml from the computed tables of docs/results, which are not installed with the program.

`python -m scripts.speeds` writes it again; a test compares. The newest table of each kind counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from server.hub.catalogue import load_catalogue
from server.plan.speed import FILE, head_bytes, linear_bytes
from server.plan.weights import Split

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
GPUS = {"pcie": "v100-pcie", "sxm2": "v100-sxm2"}
_HEAD = """\
# What a decoding step of one stream takes on two V100s, in milliseconds a part, as perfmodel/ computed it from machine
# code. `voltserve plan` and `advise` scale it to other models. Made by `python -m scripts.speeds`, not by hand.
# linear_bytes, head_bytes: what one of the two cards reads of 4-bit weights and of the head in a step.
# eager_older_host, slowest_peer: the two that bound the pessimistic end (server/plan/speed.py).
"""


def newest(pattern: str) -> Path:
    """The result file of the latest date."""
    return sorted(RESULTS.glob(pattern))[-1]


def one_stream(rows: list[dict[str, Any]], gpu: str) -> dict[str, Any]:
    """The row of one stream, with the shortest context, on this kind of card."""
    return next(row for row in rows if row["gpu"] == gpu and row["streams"] == 1)


def table(path: Path, rows: list[dict[str, Any]], shape: str) -> dict[str, Any]:
    """A table of the file."""
    model, split = load_catalogue().shapes[shape].model(), Split(2, 1)
    return {
        "result": str(path.relative_to(ROOT)),
        "layers": len(model.kinds),
        "linear_bytes": linear_bytes(model, split),
        "head_bytes": head_bytes(model, split),
        **{link: one_stream(rows, gpu)["parts_ms"] for link, gpu in GPUS.items()},
    }


def content() -> str:
    """The file's text."""
    dense_path, hybrid_path = newest("v100-32b-computed-*.json"), newest("v100-27b-computed-*.json")
    dense, hybrid = (json.loads(path.read_text(encoding="utf-8")) for path in (dense_path, hybrid_path))
    anchors: Mapping[str, float] = hybrid["anchors_tokens_s"]
    data = {
        "schema": 1,
        "tables": {
            "dense": table(dense_path, dense["rows"], "qwen3-32b"),
            "hybrid": table(hybrid_path, hybrid["decoding"], "qwen3.8-27b"),
        },
        "eager_older_host": {
            "tokens_s": one_stream(dense["rows"], GPUS["pcie"])["eager_older_host_tokens_s"],
            "layers": 64,
        },
        "slowest_peer": {
            "tokens_s": min(anchors.values()),
            "computed_tokens_s": one_stream(hybrid["decoding"], GPUS["sxm2"])["graphs_tokens_s"],
        },
    }
    return _HEAD + yaml.safe_dump(data, sort_keys=False, width=120)


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
