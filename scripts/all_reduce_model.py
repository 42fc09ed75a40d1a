"""What an all-reduce costs two GPUs, computed: ours (kernels/cuda/all_reduce.cuh) and NCCL's.

    ours    kernel + write + 1.5 read (+ read, where a warp watches its last line first) + 4/3 bytes / rate
    NCCL    latency + bytes / rate

A look that comes too early costs half of one more on average, hence 1.5 read. Lines carry 12 bytes in 16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nccl:
    """Seconds, and bytes a second each way."""

    latency: float
    rate: float
    source: str

    def seconds(self, size: int) -> float:
        """Of an all-reduce, or a gathering, of `size` bytes of each rank."""
        return self.latency + size / self.rate


@dataclass(frozen=True)
class Ours:
    """Seconds, and bytes a second each way at the same time."""

    kernel: float  # of a kernel in a graph that waits for nothing
    write: float  # until others can read what was written
    read: float  # of where the ranks meet
    rate: float
    watched: int  # bytes from which a warp watches its last line first; 0: never
    source: str

    def seconds(self, size: int) -> float:
        """Of an all-reduce of `size` bytes of each rank."""
        reads = 2.5 if self.watched and size > self.watched else 1.5
        return self.kernel + self.write + reads * self.read + 4 / 3 * size / self.rate


UNWATCHED = 12 << 10  # kernels/cuda/all_reduce_plan.h's kUnwatchedData
OURS = {
    "v100-pcie": Ours(
        3e-6, 1.0e-6, 1.3e-6, 11e9, UNWATCHED,
        "a kernel as long as all short ones; a hop over PCI 1.0 us (LL in NCCL's src/graph/tuning.cc); a load 1.3 us, "
        "stated (an H200's: 1.2, fitted); 12 GB/s over PCIe 3 x16, which loads of cache lines nearly reach (EMOGI, "
        "arXiv 2006.06890), less the requests of the other direction; each card has a root port of its own",
    ),
    "v100-sxm2": Ours(
        3e-6, 0.6e-6, 0.3e-6, 45e9, 0,
        "likewise; a hop over NVLink 0.6 us (the same file); a load of the card's own L2; two links of 25 GB/s",
    ),
    "h200-pcie": Ours(1.9e-6, 0.6e-6, 1.2e-6, 50e9, UNWATCHED, "PCIe 5 x16; fitted to the times of one token"),
    "h200-nvlink": Ours(1.9e-6, 0.6e-6, 0.0, 400e9, 0, "NVLink of an H200; fitted to the time of one token"),
}  # fmt: skip
NCCL = {
    "v100-pcie": Nccl(45e-6, 8e9, "through host memory: 30 to 60 us seen by others; PCIe 3 x16 there and back"),
    "v100-sxm2": Nccl(15e-6, 45e9, "over NVLink between two cards: 10 to 20 us usual; two links of 25 GB/s"),
}
