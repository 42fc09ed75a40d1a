"""Times of launches on the GPU at hand, and yardsticks to compare them with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kernels.tools.native import Library


def seconds(launches: Sequence[Callable[[], Any]], replays: int = 7) -> float:
    """Median time of one launch: all of `launches` in one CUDA graph, which is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(launches))
    return float(statistics.median(times[2:]))


def ceilings(library: Library) -> dict[str, float]:
    """Bytes per second of reading, and of copying (read and written bytes both counted), 1 GiB each."""
    data = torch.randint(-(2**31), 2**31 - 1, (1 << 28,), dtype=torch.int32, device="cuda")
    other, sink = torch.empty_like(data), torch.zeros(1, dtype=torch.int32, device="cuda")
    size = data.numel() * 4
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    grids = [processors * b for b in (4, 8, 16, 32)]
    read = min(seconds([partial(library.read, data, grid, sink)] * 3) for grid in grids)
    copy = min(seconds([partial(library.copy, data, other, grid)] * 3) for grid in grids)
    return {"read": size / read, "copy": 2 * size / copy}
