"""Computes how many scheduler cycles a kernel's main loop takes when its instructions wait for each other.

    python -m perfmodel.sass_schedule --gpu v100-pcie --cuda-home DIR --output docs/results/NAME.json

sass_model.py counts instructions. Kernels for many tokens have two warps per scheduler, so that dependencies cost as
much. From Volta on the machine code holds them (Jia et al., arXiv 1804.06826, section 2). Each instruction says

    how many cycles its warp waits after it
    which of six counters it holds until its result arrived, or its operands were read
    which counters it waits for first

Here one scheduler runs its warps through the loop, one instruction per cycle. A pipe is busy for sass_model's cycles.
Memory is taken to be fast enough: a load costs its latency only.

LATENCIES holds the known latencies. HMMA's is a range. Four steps of an mma.m8n8k4 start 2 cycles apart. The next one
on the same sums can start 10 after the first (Raihan et al., arXiv 1811.08309), which is 4 after the last. A counter
may be released later.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY
from perfmodel.sass_model import GPUS, MATCHES, Gpu, Instruction, Model

VARIANTS = ("mma16", "mma32", "mma64", "mma128")
HMMA_LATENCIES = (12, 16, 24)
LATENCIES = {"LDS": 36, "LDG": 700, "STS": 20, "BAR": 30}
OTHER_LATENCY = 20  # what sets a counter and is not listed above
PASSES, WARM_UP = 12, 4  # passes through the loop


@dataclass(frozen=True)
class Step:
    """What the scheduler needs of an instruction."""

    pipe: str
    stall: int  # cycles before its warp's next
    holds: tuple[tuple[int, int], ...]  # (counter, cycles until it is released)
    waits: tuple[int, ...]  # counters


@dataclass
class Warp:
    """A warp's position in the loop, and until when its counters are held."""

    ready: int
    at: int = 0
    held: list[int] = field(default_factory=lambda: [0] * 6)
    ends: list[int] = field(default_factory=list)  # the cycle at which it finished each pass


def decode(instruction: Instruction, hmma_latency: int) -> Step:
    """The control bits: stall 4, yield 1, counter of the result 3, of the operands 3, counters to wait for 6."""
    control, name = instruction.control, instruction.name.split(".")[0]
    latency = hmma_latency if name == "HMMA" else LATENCIES.get(name, OTHER_LATENCY)
    result, operands = control >> 5 & 7, control >> 8 & 7
    holds = [(result, latency)] if result != 7 else []
    if operands != 7:
        holds.append((operands, min(latency, OTHER_LATENCY)))
    waits = tuple(counter for counter in range(6) if control >> 11 & 1 << counter)
    pipe = next((pipe for pipe, names in MATCHES.items() if name in names), "other")
    return Step(pipe, max(1, control & 15, LATENCIES["BAR"] if name == "BAR" else 0), tuple(holds), waits)


def cycles(loop: Sequence[Instruction], warps: int, gpu: Gpu, hmma_latency: int) -> float:
    """Cycles of one scheduler per pass of one warp through the loop, while `warps` share it."""
    steps = [decode(instruction, hmma_latency) for instruction in loop]
    running = [Warp(ready=number * len(loop) // warps) for number in range(warps)]
    busy: dict[str, float] = {}
    now = last = 0
    while any(len(warp.ends) < PASSES for warp in running):
        for after in range(1, warps + 1):  # round robin
            warp = running[(last + after) % warps]
            step = steps[warp.at]
            waiting = warp.ready > now or any(warp.held[counter] > now for counter in step.waits)
            if not waiting and busy.get(step.pipe, 0) <= now:
                break
        else:
            now += 1
            continue
        last = (last + after) % warps
        busy[step.pipe] = now + gpu.cycles[step.pipe]
        warp.ready = now + step.stall
        for counter, latency in step.holds:
            warp.held[counter] = max(warp.held[counter], now + latency)
        warp.at = (warp.at + 1) % len(steps)
        if warp.at == 0:
            warp.ends.append(now)
        now += 1
    rates = [(len(warp.ends) - 1 - WARM_UP) / (warp.ends[-1] - warp.ends[WARM_UP]) for warp in running]
    return 1 / sum(rates)


def rows(model: Model, group: int = 16) -> list[dict[str, Any]]:
    """For each variant and latency: cycles per stage and warp, the share of issue slots, TFLOP/s of the whole GPU."""
    gpu, table = model.gpu, []
    for name in VARIANTS:
        shape = model.native.shape_of(name)
        warps = shape.blocks_per_processor * shape.threads // 128
        loop = model.kernel(name, group).loop
        flops = 2 * shape.tokens * shape.rows * 64 * shape.stage_tiles / (shape.threads // 32)
        for latency in HMMA_LATENCIES:
            taken = cycles(loop, warps, gpu, latency)
            rate = flops / taken * 4 * gpu.processors * gpu.clock_hz / 1e12
            table.append(
                {
                    "variant": name, "warps_a_scheduler": warps, "instructions": len(loop), "hmma_latency": latency,
                    "cycles": round(taken), "issue": round(len(loop) / taken, 2), "tflop_s": round(rate, 1),
                }
            )  # fmt: skip
    return table


def main() -> None:
    """Prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--cuda-home", type=Path, required=True, help="what scripts/fetch_nvcc.sh prints")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = Model(arguments.library, GPUS[arguments.gpu], arguments.cuda_home)
    table = rows(model)
    for row in table:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.output:
        result = {
            "what": "main loops of the fused kernels on a scheduler: dependencies included, memory excluded",
            "provenance": "computed", "command": " ".join(sys.argv), "gpu": model.gpu.name,
            "latencies": LATENCIES, "rows": table,
        }  # fmt: skip
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
