"""Predicts the time of the fused linear kernels on a GPU from their machine code.

    python -m perfmodel.sass_model --gpu v100-pcie --cuda-home DIR --output docs/results/NAME.json

cuobjdump prints the SASS of the kernel that the plan picks. The main loop is the innermost loop that loads weights. Its
instructions are counted by the pipe that executes them. So are those outside it, which run once per tile of a block.
With W warps, S stages and R tiles per block, and B blocks on the busiest multiprocessor,

    issue  = B * W * (S * loop + R * once) / 4 schedulers
    pipe p = B * W * (S * loop_p + R * once_p) * cycles_p / 4
    memory = bytes / read ceiling: weights from DRAM once; or weights, activations and shared sums at the L2's rate
    time   = fixed + (issue^4 + max pipe^4 + memory^4)^(1/4)

The fourth-power sum rounds the corner where two bounds are close. Cycles per warp instruction are from two sources:

    Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv 1804.06826
    NVIDIA's CUDA C++ Programming Guide, instruction throughput by compute capability

Three numbers are fitted (Constants), on half of what an H200 measured. They are used unchanged for the other half
(model_validation.py) and for the V100.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels.tools.native import LIBRARY, Library, Plan, Shape
from perfmodel.shapes import LINEAR


@dataclass(frozen=True)
class Gpu:
    """What the model knows of a GPU. `cycles`: scheduler cycles for which a warp instruction keeps each pipe busy."""

    name: str
    arch: int
    processors: int
    clock_hz: float
    read_bytes_s: float  # measured reads, not the data sheet's
    l2_bytes_s: float
    cycles: Mapping[str, float]
    copy_bytes_s: float  # read and written bytes both counted
    cublas_flops: float  # fp16, published
    registers: int = 65536
    shared_bytes: int = 96 * 1024
    max_warps: int = 64


# lsu: one unit for four schedulers, 2.5 cycles per instruction (ncu's wavefronts on an H200).
_VOLTA = {"fma": 2, "alu": 2, "half": 2, "tensor": 2, "lsu": 10, "other": 1}
# From Ampere on the fp32 lanes are doubled and execute fp16 as well. Integer multiplication keeps half the rate. An
# mma.m16n8k16 is 4096 operations; 647 TFLOP/s were measured with instructions of this kind.
_HOPPER = {"fma": 1, "alu": 2, "half": 1, "tensor": 6.5, "lsu": 10, "other": 1}
GPUS = {
    "v100-pcie": Gpu("V100 PCIe", 70, 80, 1.38e9, 879e9, 2150e9, _VOLTA, 822e9, 95e12),
    "v100-sxm2": Gpu("V100 SXM2", 70, 80, 1.53e9, 879e9, 2150e9, _VOLTA, 822e9, 95e12),
    "h200": Gpu("H200", 90, 132, 1.95e9, 4483e9, 5500e9, _HOPPER, 3941e9, 647e12, shared_bytes=227 * 1024),
}


@dataclass(frozen=True)
class Constants:
    """The three fitted numbers.

    fixed_seconds: launch, first load and last store. issue_efficiency: the share of issue slots that can be used.
    once_executed: the share of the instructions outside the loop that a block runs. It writes a tile either alone or
    with others.
    """

    fixed_seconds: float
    issue_efficiency: float
    once_executed: float


FITTED = Constants(4.4e-6, 0.48, 0.2)
DEQUANTIZE_OF_COPY = 0.93  # an H200 measured 0.89-0.97
MATCHES = {
    "fma": ("FFMA", "FMUL", "FADD", "IMAD"),
    "half": ("HADD2", "HMUL2", "HFMA2"),
    "tensor": ("HMMA",),
    "lsu": ("LDS", "STS", "LDG", "STG", "LD", "ST"),
    "alu": (
        "LOP3",
        "SHF",
        "IADD3",
        "LEA",
        "ISETP",
        "PRMT",
        "SEL",
        "MOV",
        "PLOP3",
        "CS2R",
        "IMNMX",
        "VIADD",
        "F2F",
        "LOP",
    ),
}


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    name: str  # with its modifiers: LDG.E.128.CONSTANT.SYS
    operands: str
    control: int = 0  # how its warp waits, 21 bits (sass_schedule.py)


@dataclass(frozen=True)
class Kernel:
    """A kernel's instructions split at its main loop."""

    name: str
    loop: tuple[Instruction, ...]
    once: tuple[Instruction, ...]

    @cached_property
    def pipes(self) -> tuple[Counter[str], Counter[str]]:
        """Instructions by executing pipe: of the loop, and of the rest."""
        return by_pipe(self.loop), by_pipe(self.once)


def parse(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of every function in cuobjdump's output, by demangled name."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in sass.splitlines():
        if found := re.search(r"Function : (.+)", line):
            current = functions.setdefault(found[1].strip(), [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)\s*([^;]*);", line):
            current.append(Instruction(int(found[1], 16), found[2], found[3]))
        elif current and (found := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/$", line)):  # the upper half of its 128 bits
            current[-1] = replace(current[-1], control=int(found[1], 16) >> 41 & 0x1FFFFF)
    return functions


def disassemble(library: Path, arch: str, cuda_home: Path) -> dict[str, list[Instruction]]:
    """The instructions of every kernel in a shared library, by demangled name."""
    command = [str(cuda_home / "bin" / "cuobjdump"), "-sass", "-arch", arch, str(library)]
    mangled = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    filt = [str(cuda_home / "bin" / "cu++filt")]
    return parse(subprocess.run(filt, input=mangled, check=True, capture_output=True, text=True).stdout)


def find_kernel(
    functions: dict[str, list[Instruction]], variant: str, group: int, memory_side: bool = False
) -> list[Instruction]:
    """The ungrouped kernel of a variant, found by its template arguments; `memory_side`: memory_side.cu's.

    Raises ValueError unless there is exactly one.
    """
    tokens = int(variant[3:])
    product = f"voltserve::Mma<(int){min(64, tokens)}, (int){1 if tokens == 64 else 2}>"
    if memory_side:
        product = f"voltserve::<unnamed>::Touch<(int){tokens}>"
    start = f"linear_kernel<{product}, voltserve::Tile<{product}, (int){max(1, tokens // 64)}, "
    found = [name for name in functions if start in name and f", (int){group}>, " in name and "(bool)0" in name]
    if len(found) != 1:
        raise ValueError(f"{variant}, group {group}: expected one kernel in the library, found {len(found)}")
    return functions[found[0]]


def _loads_weights(instruction: Instruction) -> bool:
    return instruction.name.startswith("LDG") and ".NA" in instruction.name


def split(name: str, instructions: Sequence[Instruction]) -> Kernel:
    """Finds the main loop: the innermost one that loads weights. Only weights are 128-bit loads past L1.

    Raises ValueError if there is none.
    """
    best: tuple[int, int] | None = None
    for branch in instructions:
        target = re.search(r"0x([0-9a-f]+)", branch.operands) if branch.name.startswith("BRA") else None
        if target is None or int(target[1], 16) >= branch.address:
            continue
        first, last = int(target[1], 16), branch.address
        if any(first <= i.address <= last and _loads_weights(i) for i in instructions) and (
            best is None or last - first < best[1] - best[0]
        ):
            best = first, last
    if best is None:
        raise ValueError(f"{name}: expected a loop with loads in its SASS, found none")
    loop = tuple(i for i in instructions if best[0] <= i.address <= best[1])
    # A branch to itself pads the end; nothing after EXIT of the last path runs.
    once = tuple(i for i in instructions if not best[0] <= i.address <= best[1] and i.name != "NOP")
    return Kernel(name, loop, once)


def by_pipe(instructions: Iterable[Instruction]) -> Counter[str]:
    """Instructions by executing pipe."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        base = instruction.name.split(".")[0]
        pipe = next((p for p, names in MATCHES.items() if base in names), "other")
        counts[pipe] += 1
    return counts


@dataclass(frozen=True)
class Prediction:
    """Seconds, and the bounds that they follow from."""

    seconds: float
    memory: float
    issue: float
    pipe: float
    busiest_pipe: str


def predict(
    gpu: Gpu,
    kernel: Kernel,
    shape: Shape,
    plan: Plan,
    m: int,
    n: int,
    k: int,
    group: int,
    constants: Constants = FITTED,
) -> Prediction:
    """The time of one launch; see the module's text."""
    warps = shape.threads // 32
    stages = math.ceil(math.ceil(k / 64) / shape.stage_tiles)
    share = plan.tiles * stages / plan.blocks
    runs = 1 if plan.blocks == plan.tiles else share / stages + 1
    # Blocks start as others end, so only grids that fit at once feel the remainder.
    waves = plan.blocks / gpu.processors
    busiest = math.ceil(waves) if waves <= shape.blocks_per_processor else waves
    scale = busiest * warps / 4 / gpu.clock_hz
    loop, once = kernel.pipes
    outside = runs * constants.once_executed
    issue = scale * (share * len(kernel.loop) + outside * len(kernel.once)) / constants.issue_efficiency
    pipes = {
        name: scale * (share * loop[name] + outside * once[name]) * cycles
        for name, cycles in gpu.cycles.items()
        if name != "other"
    }
    pipe = max(pipes, key=lambda name: pipes[name])
    weights = n * k * (0.5 + 1 / group)
    activations = -(n // -shape.rows) * m * k * 2
    shared = activations + (2 * 4 * plan.workspace_words if runs > 1 else 0)
    memory = max(weights / gpu.read_bytes_s, (weights + shared) / gpu.l2_bytes_s)
    seconds = constants.fixed_seconds + (issue**4 + pipes[pipe] ** 4 + memory**4) ** 0.25
    return Prediction(seconds, memory, issue, pipes[pipe], pipe)


def predict_dense(gpu: Gpu, m: int, n: int, k: int, group: int) -> tuple[float, float]:
    """Seconds to dequantize a weight, and of cuBLAS's GEMM: the plan's path for many tokens."""
    dequantize = n * k * (0.5 + 1 / group + 2) / (gpu.copy_bytes_s * DEQUANTIZE_OF_COPY)
    return FITTED.fixed_seconds + dequantize, FITTED.fixed_seconds + 2 * m * n * k / gpu.cublas_flops


class Model:
    """The kernels of one shared library and the GPU they are for."""

    def __init__(self, library: Path, gpu: Gpu, cuda_home: Path) -> None:
        self.gpu = gpu
        self.native = Library(library)
        self._kernels: dict[tuple[str, int, bool], Kernel] = {}
        self.functions = disassemble(library, f"sm_{gpu.arch}", cuda_home)

    def kernel(self, variant: str, group: int, memory_side: bool = False) -> Kernel:
        """The kernel of a variant, split at its main loop."""
        key = variant, group, memory_side
        if key not in self._kernels:
            self._kernels[key] = split(variant, find_kernel(self.functions, *key))
        return self._kernels[key]

    def predict(
        self, m: int, n: int, k: int, group: int = 16, memory_side: bool = False, constants: Constants = FITTED
    ) -> tuple[Shape, Plan, Prediction]:
        """The prediction for one problem. Raises ValueError where no fused kernel is planned."""
        plan = self.native.plan(m, n, k, group, self.gpu.arch, self.gpu.processors)
        shape = self.native.shape(plan.variant)
        if shape is None or plan.path != "fused":
            raise ValueError(f"M={m}: expected a fused plan, got {plan.path}")
        kernel = self.kernel(shape.name, group, memory_side)
        return shape, plan, predict(self.gpu, kernel, shape, plan, m, n, k, group, constants)

    def row(self, m: int, n: int, k: int, group: int = 16, memory_side: bool = False) -> dict[str, Any]:
        """The prediction for one problem, as a row of a table."""
        if self.native.plan(m, n, k, group, self.gpu.arch, self.gpu.processors).path != "fused":
            dequantize, cublas = predict_dense(self.gpu, m, n, k, group)
            return {
                "m": m, "n": n, "k": k, "variant": "cuBLAS", "us": round((dequantize + cublas) * 1e6, 2),
                "dequantize_us": round(dequantize * 1e6, 2),
                "tflop_s": round(2 * m * n * k / (dequantize + cublas) / 1e12, 1),
            }  # fmt: skip
        shape, plan, p = self.predict(m, n, k, group, memory_side)
        weights = n * k * (0.5 + 1 / group)
        return {
            "m": m, "n": n, "k": k, "variant": shape.name, "blocks": plan.blocks,
            "us": round(p.seconds * 1e6, 2), "of_read": round(weights / p.seconds / self.gpu.read_bytes_s, 3),
            "tflop_s": round(2 * m * n * k / p.seconds / 1e12, 1),
            "memory_us": round(p.memory * 1e6, 2), "issue_us": round(p.issue * 1e6, 2),
            "pipe_us": round(p.pipe * 1e6, 2), "busiest_pipe": p.busiest_pipe,
        }  # fmt: skip


def main() -> None:
    """Prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, required=True)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--cuda-home", type=Path, required=True, help="what scripts/fetch_nvcc.sh prints")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512, 768, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = Model(arguments.library, GPUS[arguments.gpu], arguments.cuda_home)
    rows = [{"layer": name, **model.row(m, n, k)} for name, n, k in LINEAR for m in arguments.tokens]
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.output:
        gpu = asdict(model.gpu)
        what = "time of the fused kernels predicted from their machine code; of cuBLAS by its rate"
        result = {
            "what": what, "provenance": "computed", "command": " ".join(sys.argv), "gpu": gpu,
            "constants": asdict(FITTED), "rows": rows,
        }  # fmt: skip
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
