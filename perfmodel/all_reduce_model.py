"""Computes what an all-reduce costs two GPUs: ours (kernels/cuda/all_reduce/all_reduce.cuh, norm.cuh) and NCCL's.

    python -m perfmodel.all_reduce_model docs/results/all-reduce-h200-DATE.json --output F.json

    ours               kernel + write + 1.5 read + 8/7 bytes / rate
    ours with norm     the same + norm: the addition to the residual and its RMS norm in the same kernel
    NCCL               latency + bytes / rate

A read that is too early costs half of another read on average, hence 1.5 read. Lines carry 14 bytes of data in 16. The
command compares the model, with an H200's constants, with the times that scripts/gpu_tp2/reduce.py measured there. It
then writes the times for two V100s.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Nccl:
    """Seconds, and bytes per second each way."""

    latency: float
    rate: float
    source: str

    def seconds(self, size: int) -> float:
        """The time of an all-reduce, or of a gather, of `size` bytes per rank."""
        return self.latency + size / self.rate


@dataclass(frozen=True)
class Ours:
    """Seconds, and bytes per second each way at the same time."""

    kernel: float  # a kernel in a graph that waits for nothing
    write: float  # until others can read what was written
    read: float  # of where the ranks meet
    rate: float
    norm: float  # from the last line to the norm's last number
    source: str

    def seconds(self, size: int) -> float:
        """The time of an all-reduce of `size` bytes per rank."""
        return self.kernel + self.write + 1.5 * self.read + 8 / 7 * size / self.rate

    def seconds_with_norm(self, size: int) -> float:
        """As above, with addition and norm."""
        return self.seconds(size) + self.norm


OURS = {
    "v100-pcie": Ours(
        3e-6, 1.0e-6, 1.3e-6, 9e9, 2.7e-6,
        "a kernel as long as all short ones; a hop over PCI 1.0 us (LL in NCCL's src/graph/tuning.cc); a load 1.3 us, "
        "stated; PCIe 3 x16 moves 12 GB/s one way, which loads of cache lines nearly reach (EMOGI, arXiv 2006.06890): "
        "three quarters of it with both ways busy, stated; each card has a root port of its own; the norm "
        "an H200's 1.9 us by the clocks' ratio",
    ),
    "v100-sxm2": Ours(
        3e-6, 0.6e-6, 0.3e-6, 45e9, 2.7e-6,
        "likewise; a hop over NVLink 0.6 us (the same file); a load of the card's own L2; two links of 25 GB/s",
    ),
}  # fmt: skip
NCCL = {
    "v100-pcie": Nccl(45e-6, 8e9, "through host memory: 30 to 60 us seen by others; PCIe 3 x16 there and back"),
    "v100-sxm2": Nccl(15e-6, 45e9, "over NVLink between two cards: 10 to 20 us usual; two links of 25 GB/s"),
}
# By the ways of scripts/gpu_tp2/reduce.py.
H200 = {
    "shared": Ours(1.9e-6, 0.5e-6, 0.65e-6, 27e9, 1.9e-6, "PCIe 5 x16, fitted"),
    "peer": Ours(1.9e-6, 0.6e-6, 0.1e-6, 220e9, 1.9e-6, "NVLink, fitted"),
}


def check(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured times in graphs beside the model's, in microseconds."""
    rows = []
    for way, model in H200.items():
        for row in measured["ways"][way]["rows"]:
            if row["way"] in ("ours", "ours with norm"):
                together = row["way"] != "ours"
                seconds = model.seconds_with_norm(row["bytes"]) if together else model.seconds(row["bytes"])
                computed = round(1e6 * seconds, 2)
                ratio = round(computed / row["us_in_a_graph"], 2)
                rows.append({"way": way, "tokens": row["tokens"], "norm": together, "measured_us": row["us_in_a_graph"]}
                            | {"computed_us": computed, "computed_by_measured": ratio})  # fmt: skip
    return rows


def main() -> None:
    """Prints and writes the comparison, and the V100s' times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    tokens = (1, 8, 16, 32)
    v100 = [
        {"gpu": gpu, "tokens": many, "ours_us": round(1e6 * OURS[gpu].seconds(10240 * many), 1)}
        | {"ours_with_norm_us": round(1e6 * OURS[gpu].seconds_with_norm(10240 * many), 1)}
        | {"nccl_us": round(1e6 * NCCL[gpu].seconds(10240 * many), 1)}
        for gpu in NCCL
        for many in tokens
    ]
    result = {
        "what": "all-reduces of M x 5120 halves between two GPUs: the model beside an H200's times, and on V100s",
        "provenance": "computed",
        "command": " ".join(sys.argv),
        "constants": {name: asdict(one) for name, one in {**OURS, **H200}.items()},
        "nccl": {name: asdict(one) for name, one in NCCL.items()},
        "h200": check(json.loads(arguments.measured.read_text())),
        "v100": v100,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in [*result["h200"], *v100]:
        print(row)


if __name__ == "__main__":
    main()
