"""For measure.py: where a decoding step's time goes, by Python's profiler and torch's; how long the GPU idles in it."""

import cProfile
import io
import pstats
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

TOKENS = 24  # decoded while a profiler looks; of the second half the GPU's idle time is told
HOST_GAP = 10.0  # µs: longer than between two kernels of a graph
ORDERS = ("self_cpu_time_total", "self_cuda_time_total")
Decode = Callable[[int, int], Awaitable[None]]  # (streams, tokens)


class Profilers:
    """What vLLM's worker gains for it."""

    def voltserve_profile_python(self, on: bool, path: str = "") -> None:
        """Starts Python's profiler, or stops it and writes its table."""
        if on:
            self._python_profiler = cProfile.Profile()
            self._python_profiler.enable()
            return
        self._python_profiler.disable()
        table = io.StringIO()
        for order in ("tottime", "cumtime"):
            pstats.Stats(self._python_profiler, stream=table).sort_stats(order).print_stats(60)
        Path(path).write_text(table.getvalue())

    def voltserve_profile(self, on: bool, path: str = "") -> None:
        """Starts torch's profiler, or stops it and writes its table."""
        if on:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            )
            self._profiler.start()
            return
        torch.cuda.synchronize()
        self._profiler.stop()
        averages = self._profiler.key_averages()
        tables = [averages.table(sort_by=key, row_limit=45, max_name_column_width=70) for key in ORDERS]
        Path(path).write_text("\n\n".join(tables))

    def voltserve_busy(self, on: bool) -> list[tuple[float, float]]:
        """Starts torch's profiler of the GPU alone, or stops it and returns when something ran there, in µs."""
        if on:
            self._busy_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._busy_profiler.start()
            return []
        torch.cuda.synchronize()
        self._busy_profiler.stop()
        on_gpu = (event for event in self._busy_profiler.events() if event.device_type == DeviceType.CUDA)
        return [(event.time_range.start, event.time_range.end) for event in on_gpu]


async def write(engine: Any, decode: Decode, beside: Path, kind: str) -> None:
    """Writes tables beside `beside`. Of a replay Python's is vLLM's alone, and left out."""
    for profiler, streams in (
        ("voltserve_profile_python", 1),
        ("voltserve_profile_python", 8),
        ("voltserve_profile", 1),
    ):
        python = profiler.endswith("python")
        if python and kind == "graphs":
            continue
        await engine.collective_rpc(profiler, args=(True,))
        await decode(streams, TOKENS // 2)
        name = f"{beside.stem}-profile-{kind}-{'python' if python else 'torch'}-{streams}.txt"
        await engine.collective_rpc(profiler, args=(False, str(beside.with_name(name))))


async def idle(engine: Any, decode: Decode, streams: int) -> dict[str, float]:
    """How long the first GPU runs nothing in a decoding step, in ms: `idle_ms`, of which `host_ms` in gaps that are too
    long for those between kernels of a graph. Of the last steps, in which all streams decode.
    """
    await engine.collective_rpc("voltserve_busy", args=(True,))
    await decode(streams, TOKENS)
    return gaps((await engine.collective_rpc("voltserve_busy", args=(False,)))[0]) | {"streams": streams}


def gaps(busy: list[tuple[float, float]], steps: int = TOKENS // 2) -> dict[str, float]:
    """`idle`'s figures of times (begin, end) in µs, when something ran; a step begins after one of the longest gaps."""
    end, found = sorted(busy)[0][1], []
    for begin, ends in sorted(busy):
        if begin > end:
            found.append((begin - end, begin))
        end = max(end, ends)
    begins = sorted(begin for _, begin in sorted(found)[-2 * steps + 2 :])[-steps:]
    within = [gap for gap, begin in found if begins[0] < begin <= begins[-1]]
    a_step = 1e-3 / (len(begins) - 1)
    return {
        "step_ms": round(a_step * (begins[-1] - begins[0]), 4),
        "idle_ms": round(a_step * sum(within), 4),
        "host_ms": round(a_step * sum(gap for gap in within if gap > HOST_GAP), 4),
    }
