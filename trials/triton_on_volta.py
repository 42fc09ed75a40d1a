"""Triton's kernels compiled for sm_70 without a V100, and what the compiler made of each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with which vLLM does not ask for a GPU before it imports Triton

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

SHARED_MEMORY, PROCESSORS = 96 * 1024, 80  # bytes of one of a V100's processors; how many it has
SETTINGS = (
    *("BT", "BK", "BV", "BLOCK_M", "BLOCK_N", "BLOCK_SIZE", "BLOCK_SIZE_M", "TILE_SIZE", "BLOCK_DMODEL"),
    *("TOPK_ENABLED", "TOPP_ENABLED", "num_warps", "num_stages"),
)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Volta:
    """What Triton asks of a driver, for a V100 that is not there."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": PROCESSORS}
    )

    def get_current_target(self) -> GPUTarget:
        """Compute capability 7.0, warps of 32."""
        return GPUTarget("cuda", 70, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


class Recorder:
    """Compiles in place of launching; `rows` has one entry per kernel and configuration."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.used_for = ""
        self.launched = 0
        self._seen: set[tuple[str, str]] = set()
        compile_only = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._record(function, lambda: compile_only(function, *args, grid=grid, warmup=True, **kwargs), kwargs)

        def tune(tuner: Any, *args: Any, **kwargs: Any) -> None:
            most_warps: dict[str, Any] = {}  # by block sizes: fewer warps only spill more
            for config in sorted(tuner.configs, key=lambda config: config.num_warps):
                most_warps[str(config.kwargs)] = config
            for config in most_warps.values():
                tuner.fn.run(*args, **{**kwargs, **config.all_kwargs()})

        JITFunction.run = run
        Autotuner.run = tune

    def _record(self, function: Any, compiled: Callable[[], Any], options: dict[str, Any]) -> None:
        self.launched += 1
        name = function.fn.__name__
        settings = {key: value for key, value in options.items() if key in SETTINGS}
        # Of stages a V100 knows nothing: it copies to shared memory through registers.
        key = (name, json.dumps({key: value for key, value in settings.items() if key != "num_stages"}, default=str))
        if key in self._seen:
            return
        self._seen.add(key)
        row: dict[str, Any] = {"kernel": name, "for": self.used_for, "settings": settings}
        try:
            row |= describe(compiled())
        except Exception as error:  # whatever stops the compiler is the finding
            row["fails"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
        self.rows.append(row)
        print(json.dumps(row, default=str), flush=True)


def describe(kernel: Any) -> dict[str, Any]:
    """What the compiler made of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(kernel.asm["ptx"])
        command = [str(TOOLS / "ptxas"), "-v", "--gpu-name=sm_70", str(ptx), "-o", str(cubin)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        command = [str(TOOLS / "nvdisasm"), "-c", str(cubin)]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found[1]) if found else 0

    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9.]+)", sass)
    shared = kernel.metadata.shared
    made = {
        "registers": number(r"Used (\d+) registers"),
        "spilled_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared_bytes": shared,
        "dots": len(re.findall(r"\btt\.dot\b", kernel.asm["ttir"])),
        "ffma": sum(name.startswith("FFMA") for name in code),
        "hmma": sum(name.startswith("HMMA") for name in code),
        "instructions": len(code),
    }
    if shared > SHARED_MEMORY:
        made["fails"] = f"needs {shared} bytes of shared memory, a V100's processor has {SHARED_MEMORY}"
    return made
