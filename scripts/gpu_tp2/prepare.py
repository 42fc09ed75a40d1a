"""Makes build/gpu_tp2/: small NVFP4 models in several formats, what the CPU engine answers, and the jobs for two GPUs.

.venv/bin/python -m scripts.gpu_tp2.prepare

The models are those of tests/engine/models.py: awkward widths, fused members with unequal globals, one key/value head.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine.models import QWEN3, QWEN3_MOE, formats, write_model

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu_tp2"
MODELS = {
    "compressed-tensors": (QWEN3, "compressed-tensors"),
    "awq": (QWEN3, "modelopt AWQ"),
    "quasarnvfp4": (QWEN3, "quasarnvfp4"),
    "experts": (QWEN3_MOE, "compressed-tensors"),
}
# One GPU, two through peer memory, two through the host's shared memory.
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "one": (1, {}),
    "peer": (2, {}),
    "shared": (2, {"NCCL_P2P_DISABLE": "1"}),
}
GPU_FLAGS = ("--dtype", "float16", "--gpu-memory-utilization", "0.05")
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    """Writes the models anew, and asks the CPU engine."""
    shutil.rmtree(OUT, ignore_errors=True)
    on_cpu: list[dict[str, Any]] = []
    on_gpus: list[dict[str, Any]] = []
    for name, (architecture, form) in MODELS.items():
        model = OUT / name
        write_model(model, OUT / "twin", architecture, form)
        shutil.rmtree(OUT / "twin")
        asked = formats(architecture.router)[form].quantization
        flags = ["--quantization", asked] if asked else []
        on_cpu.append({"flags": ["--model", str(model), *flags], "output": str(OUT / f"{name}.cpu.json")})
        for way, (ranks, environment) in WAYS.items():
            # Relative to the repository, which is elsewhere on the machine with the GPUs.
            flags_here = ["--model", str(model.relative_to(ROOT)), *flags, "--tensor-parallel-size", str(ranks)]
            output = f"{name}.{way}.json"
            on_gpus.append({"flags": [*flags_here, *GPU_FLAGS], "environment": environment, "output": output})
    (OUT / "cpu.json").write_text(json.dumps(on_cpu))
    (OUT / "gpus.json").write_text(json.dumps(on_gpus, indent=1))
    command = [sys.executable, "-m", "tests.engine.greedy", str(OUT / "cpu.json")]
    environment = os.environ | CPU | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main()
