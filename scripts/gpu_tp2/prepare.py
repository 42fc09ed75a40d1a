"""Makes build/gpu_tp2/: a small NVFP4 model in every format, what the CPU engine answers, and the jobs for two GPUs.

.venv/bin/python -m scripts.gpu_tp2.prepare

The models are those of lookalikes/random_models.py: awkward widths, fused members with unequal globals, one key/value
head. Heads have 64 dimensions, which our attention takes. Each way has its own job file, since ways may run side by
side.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookalikes.random_models import QWEN3, QWEN3_MOE, formats, write_model

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu_tp2"
HEAD_DIM = 64
MODELS = {form.replace(" ", "-"): (QWEN3, form) for form in formats("")} | {
    "experts": (QWEN3_MOE, "compressed-tensors")
}


@dataclass(frozen=True)
class Way:
    """How GPUs run a model."""

    ranks: int
    environment: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


NCCL = ("--disable-custom-all-reduce",)
THROUGH_HOST = {"NCCL_P2P_DISABLE": "1"}
WAYS = {
    "one": Way(1),
    "one-not-recorded": Way(1, {"TORCH_COMPILE_DISABLE": "1"}),
    "peer": Way(2, flags=NCCL),
    "shared": Way(2, THROUGH_HOST, NCCL),
    "shared-graphs": Way(2, THROUGH_HOST, (*NCCL, "--no-enforce-eager")),
    "own": Way(2, THROUGH_HOST),
    "own-graphs": Way(2, THROUGH_HOST, ("--no-enforce-eager",)),
}
# The cache's size is given, since ways side by side would take each other's memory for their own.
GPU_FLAGS = ("--dtype", "float16", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "268435456")
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    """Writes the models anew, and asks the CPU engine."""
    shutil.rmtree(OUT, ignore_errors=True)
    on_cpu: list[dict[str, Any]] = []
    on_gpus: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for name, (architecture, form) in MODELS.items():
        model = OUT / name
        write_model(model, OUT / "twin", architecture, form, head_dim=HEAD_DIM)
        shutil.rmtree(OUT / "twin")
        asked = formats(architecture.router)[form].quantization
        flags = ["--quantization", asked] if asked else []
        on_cpu.append({"flags": ["--model", str(model), *flags], "output": str(OUT / f"{name}.cpu.json")})
        for word, way in WAYS.items():
            # Relative to the repository, which is elsewhere on the machine with the GPUs.
            asked_here = ["--model", str(model.relative_to(ROOT)), *flags, "--tensor-parallel-size", str(way.ranks)]
            job = {"flags": [*asked_here, *GPU_FLAGS, *way.flags], "environment": way.environment}
            on_gpus[word].append(job | {"output": f"{name}.{word}.json"})
    (OUT / "cpu.json").write_text(json.dumps(on_cpu))
    for word, jobs in on_gpus.items():
        (OUT / f"jobs.{word}.json").write_text(json.dumps(jobs, indent=1))
    command = [sys.executable, "-m", "scripts.gpu_tp2.greedy", str(OUT / "cpu.json")]
    environment = os.environ | CPU | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main()
