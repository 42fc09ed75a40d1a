"""Where a decoding step's time goes, by Python's profiler, by torch's, and beside the GPU's work."""

import cProfile
import io
import pstats
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

TOKENS = 12  # decoded while a profiler looks
REPLAYS = 10
ORDERS = ("self_cpu_time_total", "self_cuda_time_total")
Decode = Callable[[int, int], Awaitable[None]]  # (streams, tokens)


class Profilers:
    """What vLLM's worker gains for it."""

    model_runner: Any

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

    def voltserve_gpu_ms(self, size: int) -> dict[str, float]:
        """The GPU's time for a step of `size` sequences, in ms: its graph, and the logits of all of them.

        The graph is replayed over the inputs of its last step, so that no request may be under way.
        """
        runner = self.model_runner
        (entry,) = (
            entry
            for batch, entry in runner.model.concrete_cudagraph_entries.items()
            if batch.num_tokens == size and entry.cudagraph is not None
        )
        hidden = torch.zeros(size, runner.model_config.get_hidden_size(), dtype=torch.float16, device="cuda")
        logits = runner.get_model().compute_logits
        return {"graph_ms": milliseconds(entry.cudagraph.replay), "logits_ms": milliseconds(lambda: logits(hidden))}


def milliseconds(run: Callable[[], Any]) -> float:
    """The GPU's time for `run`, the median of several."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return round(float(statistics.median(begin.elapsed_time(end) for begin, end in times)), 4)


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
        await decode(streams, TOKENS)
        name = f"{beside.stem}-profile-{kind}-{'python' if python else 'torch'}-{streams}.txt"
        await engine.collective_rpc(profiler, args=(False, str(beside.with_name(name))))


async def beside(engine: Any, decode: Decode, streams: int, step_ms: float) -> dict[str, float]:
    """Where a decoding step in graphs of `step_ms` goes: `graph_ms` of the model's layers, `logits_ms`, and `host_ms`,
    in which the GPU waits for the host, copies and samples.
    """
    await decode(streams, TOKENS)  # whose last step is replayed
    parts: dict[str, float] = (await engine.collective_rpc("voltserve_gpu_ms", args=(streams,)))[0]
    return {"streams": streams, "step_ms": step_ms} | parts | {"host_ms": round(step_ms - sum(parts.values()), 3)}
