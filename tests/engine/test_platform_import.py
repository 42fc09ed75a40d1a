"""The Volta platform is imported in the middle of vLLM's own first import; without a GPU here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from engine import gpus
from engine.volta import Gpu

gpus.visible = lambda: (Gpu(0, "Tesla V100", (7, 0)),)
gpus.kernels_are_for_gpus = lambda: True
gpus.physical_indexes = lambda: (0,)
import vllm.engine.arg_utils
import vllm.entrypoints.openai.api_server
import vllm.v1.worker.gpu_worker
from vllm.platforms import current_platform

print(type(current_platform).__name__)
"""


def test_vllm_takes_the_platform_while_it_imports_itself() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["VoltaPlatform"], done.stderr[-2000:]
