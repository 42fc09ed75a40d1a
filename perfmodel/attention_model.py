"""Predicts the time of attention on a V100 from machine code: ours, and vLLM's Triton kernel for comparison.

    python -m perfmodel.attention_model --gpu v100-pcie --cuda-home DIR [--vllm FOLDER] --output NAME.json
    python -m perfmodel.attention_model --gpu h200 --cuda-home DIR --library build/cuda-80-90/libvoltserve_cuda.so \
        --validate BENCH.json

The model is that of perfmodel/sass_model.py, and so are its GPUs. The main loop is the innermost loop with the matrix
products; it walks one tile of cached positions. All of its instructions are counted, even the paths for masks and soft
caps, which most tiles skip. With B tiles of all blocks, W warps per block and P multiprocessors,

    issue  = B * W / P * loop / 4 schedulers / issue_efficiency, and likewise for each pipe with its cycles
    memory = the cache read once at the read ceiling, or every block's reads at the L2's rate
    time   = fixed + (issue^4 + max pipe^4 + memory^4)^(1/4)

fixed is sass_model.py's time of a launch. It counts twice where a decoding step merges its splits.

Three rates go beyond that model (NVIDIA's table of instruction throughput). Shared memory and loads move 128 bytes per
clock and multiprocessor, broadcast or not; a shuffle takes one clock. Special functions compute 16 lanes per clock. The
model has no latencies, so its speed is an upper bound where HMMA chains and barriers stall.

Triton's kernel is compiled for sm_70 as vLLM launches it for a prompt. It uses no tensor cores; its products are FFMA.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.tools import triton_peer
from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import AttentionLibrary
from perfmodel.sass_model import GPUS, Constants, Gpu, Instruction, disassemble, parse
from perfmodel.shapes import ATTENTION, BATCHES, SKEWED

# Fitted to the fused linear kernels of 2026-11-29 on an H200. --validate says how well they hold here.
FITTED = Constants(4.5e-6, 0.8, 0.5)
PIPES = {
    "fma": ("FFMA", "FMUL", "FADD", "IMAD"),
    "half": ("HADD2", "HMUL2", "HFMA2"),
    "tensor": ("HMMA",),
    "special": ("MUFU", "F2F"),
    "memory": ("LDS", "STS", "LDG", "STG", "LD", "ST", "LDL", "STL", "SHFL"),
    "alu": (
        "LOP3", "SHF", "IADD3", "LEA", "ISETP", "PRMT", "SEL", "MOV", "PLOP3", "CS2R", "IMNMX", "FSEL", "FSETP",
        "FMNMX",
    ),
}  # fmt: skip
# (new tokens, positions before them) of a prompt, whole or its last chunk.
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (2048, 6144), (2048, 30720))


def cycles(instruction: Instruction, gpu: Gpu) -> tuple[str, float]:
    """The pipe of an instruction, and the scheduler cycles for which a warp keeps it busy."""
    base, *modifiers = instruction.name.split(".")
    pipe = next((name for name, bases in PIPES.items() if base in bases), "other")
    if pipe == "memory":
        width = next((int(m) for m in modifiers if m in ("64", "128")), 32)
        return pipe, 4 * width / 32  # a unit for four schedulers
    return pipe, 8 if pipe == "special" else gpu.cycles.get(pipe, 1)


def main_loop(name: str, instructions: Sequence[Instruction]) -> list[Instruction]:
    """The innermost loop with most of the products (HMMA if there are any). Raises ValueError if there is none."""
    names = [i.name.split(".")[0] for i in instructions]
    product = "HMMA" if "HMMA" in names else "FFMA"

    def products(loop: Sequence[Instruction]) -> int:
        return sum(i.name.split(".")[0] == product for i in loop)

    loops = []
    for branch in instructions:
        target = re.search(r"0x([0-9a-f]+)", branch.operands) if branch.name.startswith("BRA") else None
        if target and int(target[1], 16) < branch.address:
            loops.append([i for i in instructions if int(target[1], 16) <= i.address <= branch.address])
    enough = [loop for loop in loops if products(loop) >= 0.5 * products(instructions) and products(loop) >= 8]
    if not enough:
        raise ValueError(f"{name}: expected a loop with its products in its SASS, found none")
    return min(enough, key=len)


@dataclass(frozen=True)
class Kernel:
    """A kernel's main loop, and the block that runs it: rows by cached positions per iteration."""

    name: str
    loop: tuple[Instruction, ...]
    warps: int
    rows: int
    positions: int

    def count(self, base: str) -> int:
        """Instructions of the loop with this name, without modifiers."""
        return sum(i.name.split(".")[0] == base for i in self.loop)

    def iteration(self, gpu: Gpu) -> tuple[float, float, str]:
        """Seconds of a multiprocessor for one iteration of a block: issue, the busiest pipe, and its name."""
        busy: dict[str, float] = defaultdict(float)
        for instruction in self.loop:
            pipe, taken = cycles(instruction, gpu)
            busy[pipe] += taken
        busy.pop("other", None)
        pipe = max(busy, key=lambda name: busy[name])
        scale = self.warps / 4 / gpu.clock_hz
        return scale * len(self.loop) / FITTED.issue_efficiency, scale * busy[pipe], pipe


def blend(*bounds: float) -> float:
    """The larger bound, its corner rounded where two are close."""
    return math.pow(sum(bound**4 for bound in bounds), 0.25)


def causal_iterations(kernel: Kernel, new: int, before: int, group: int) -> int:
    """Iterations of all blocks of a key head: each block of rows walks what its last row sees."""
    rows = new * group
    tiles = range(0, rows, kernel.rows)
    return sum(math.ceil((before + (min(t + kernel.rows, rows) - 1) // group + 1) / kernel.positions) for t in tiles)


def prompt(gpu: Gpu, kernel: Kernel, heads: tuple[int, int, int], new: int, before: int) -> dict[str, Any]:
    """A row of the table of prompts: one request of `new` tokens after `before`."""
    q_heads, kv_heads, head_dim = heads
    iterations = kv_heads * causal_iterations(kernel, new, before, q_heads // kv_heads)
    issue, pipe, busiest = kernel.iteration(gpu)
    cache = 4 * head_dim * kernel.positions * iterations / gpu.l2_bytes_s
    seconds = FITTED.fixed_seconds + blend(
        iterations / gpu.processors * issue, iterations / gpu.processors * pipe, cache
    )
    seen = sum(before + t + 1 for t in range(new))
    return {
        "us": round(seconds * 1e6, 1), "tflop_s": round(4 * head_dim * q_heads * seen / seconds / 1e12, 1),
        "busiest_pipe": busiest, "pipe_of_issue": round(pipe / issue, 2), "l2_us": round(cache * 1e6, 1),
    }  # fmt: skip


def decode(gpu: Gpu, kernel: Kernel, heads: tuple[int, int, int], positions: Sequence[int]) -> dict[str, Any]:
    """A row of the table of decoding steps."""
    _, kv_heads, head_dim = heads
    iterations = kv_heads * sum(math.ceil(p / kernel.positions) for p in positions)
    issue, pipe, busiest = kernel.iteration(gpu)
    read = 4 * head_dim * kv_heads * sum(positions) / gpu.read_bytes_s
    seconds = 2 * FITTED.fixed_seconds + blend(
        iterations / gpu.processors * issue, iterations / gpu.processors * pipe, read
    )
    return {
        "us": round(seconds * 1e6, 1), "of_read": round(read / seconds, 3), "read_us": round(read * 1e6, 1),
        "issue_us": round(iterations / gpu.processors * issue * 1e6, 1), "busiest_pipe": busiest,
    }  # fmt: skip


class Model:
    """Our kernels in one shared library: its launchers, its machine code by demangled name, and the GPU it is for."""

    def __init__(self, native: AttentionLibrary, functions: Mapping[str, Sequence[Instruction]], gpu: Gpu) -> None:
        self.native, self.functions, self.gpu = native, functions, gpu

    def kernel(self, start: str, warps: int, rows: int, positions: int) -> Kernel:
        """The kernel whose demangled name holds `start`. Raises ValueError unless there is exactly one."""
        found = [name for name in self.functions if start in name]
        if len(found) != 1:
            raise ValueError(f"{start}: expected one kernel in the library, found {len(found)}")
        return Kernel(start, tuple(main_loop(start, self.functions[found[0]])), warps, rows, positions)

    def prefill(self, head_dim: int) -> Kernel:
        """The kernel for prompts."""
        plan = self.native.plan(1, 64, 0, 64, 1, 1, head_dim, self.gpu.processors)
        start = f"attention_prefill_kernel<(int){head_dim}>"
        return self.kernel(start, plan.prefill_rows // 16, plan.prefill_rows, plan.prefill_tokens)

    def decode(self, heads: tuple[int, int, int], requests: int, new: int) -> Kernel:
        """The kernel for a decoding step of `requests` with `new` tokens each."""
        plan = self.native.plan(requests, requests * new, new, new, *heads, self.gpu.processors)
        shape = plan.decode
        if shape is None:
            raise ValueError(f"{new} new tokens: expected a decoding step, got a prompt")
        start = f"attention_decode_kernel<(int){shape.head_dim}, (int){shape.row_warps}>"
        return self.kernel(start, shape.row_warps * shape.token_warps, shape.rows, shape.tile)


def triton_prefill(vllm: Path, head_dim: int, group: int, cuda_home: Path) -> Kernel:
    """vLLM's kernel for prompts, compiled for sm_70 with `group` query heads per key head."""
    binary, warps, rows, positions = triton_peer.compile_prefill(triton_peer.load(vllm), head_dim, group)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(cuda_home / "bin" / "cuobjdump"), "-sass", file.name]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (instructions,) = parse(sass).values()
    return Kernel("triton unified_attention", tuple(main_loop("triton", instructions)), warps, rows, positions)


def predict(model: Model, vllm: Path | None, cuda_home: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables of prompts and of decoding steps."""
    prompts: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for name, q_heads, kv_heads, head_dim in ATTENTION:
        heads = (q_heads, kv_heads, head_dim)
        ours = model.prefill(head_dim)
        theirs = triton_prefill(vllm, head_dim, q_heads // kv_heads, cuda_home) if vllm else None
        for new, before in PROMPTS:
            row = {"model": name, "new_tokens": new, "positions_before": before}
            row |= prompt(model.gpu, ours, heads, new, before)
            row |= {"hmma_of_loop": f"{ours.count('HMMA')} of {len(ours.loop)}"}
            if theirs:
                other = prompt(model.gpu, theirs, heads, new, before)
                row |= {"triton_us": other["us"], "triton_tflop_s": other["tflop_s"]}
                row |= {"triton_local_memory": theirs.count("LDL") + theirs.count("STL")}
                row |= {"speedup": round(other["us"] / row["us"], 1)}
            prompts.append(row)
        for requests, new, positions in (*((r, n, [p] * r) for r, n, p in BATCHES), (len(SKEWED), 1, list(SKEWED))):
            row = {"model": name, "requests": requests, "new_tokens": new, "positions": sorted(set(positions))}
            steps.append(row | decode(model.gpu, model.decode(heads, requests, new), heads, positions))
    return {"prompts": prompts, "decoding": steps}


def validate(model: Model, bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured beside predicted, for every row of scripts/bench_attention.py's result."""
    rows = []
    for measured in bench["rows"]:
        heads = (measured["q_heads"], measured["kv_heads"], measured["head_dim"])
        given = measured["positions"]
        positions = given if isinstance(given, list) else [given] * measured["requests"]
        row = decode(model.gpu, model.decode(heads, measured["requests"], measured["new_tokens"]), heads, positions)
        kept = {name: measured[name] for name in ("model", "requests", "new_tokens", "positions")}
        ratio = round(row["us"] / measured["us"], 3)
        rows.append(kept | row | {"measured_us": measured["us"], "predicted_of_measured": ratio})
    return rows


def main() -> None:
    """Prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--cuda-home", type=Path, required=True, help="what scripts/fetch_nvcc.sh prints")
    parser.add_argument("--vllm", type=Path, help="the vllm package folder, to predict Triton's kernel as well")
    parser.add_argument("--validate", type=Path, help="a result of scripts/bench_attention.py to compare with")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gpu = GPUS[arguments.gpu]
    functions = disassemble(arguments.library, f"sm_{gpu.arch}", arguments.cuda_home)
    model = Model(AttentionLibrary(arguments.library), functions, gpu)
    if arguments.validate:
        tables = {"validation": validate(model, json.loads(arguments.validate.read_text()))}
    else:
        tables = predict(model, arguments.vllm, arguments.cuda_home)
    for row in (row for rows in tables.values() for row in rows):
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.output:
        what = "time of attention predicted from machine code"
        head = {"what": what, "provenance": "computed", "command": " ".join(sys.argv), "gpu": asdict(model.gpu)}
        arguments.output.write_text(json.dumps(head | tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
