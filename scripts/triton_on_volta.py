"""Compiles for sm_70, without a GPU, every Triton kernel that vLLM would run for a Gated DeltaNet layer.

    python -m scripts.triton_on_volta docs/results/gdn-triton-sm70-DATE.json

vLLM's own functions are called on CPU tensors of one rank of the 27B at TP=2, in fp16. It has 8 key and 24 value heads
of 128, and 12 query and 2 key/value heads of 256. Where they launch a kernel, Triton compiles it for a V100, and
nothing runs. An autotuned kernel is compiled for each block size with most warps. The result has, per kernel,
registers, spilled bytes, shared memory and matrix products (`tt.dot`). It also counts fused multiply-adds and tensor
core instructions in the machine code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with which vLLM does not ask for a GPU before it imports Triton

import torch
import triton
from triton.runtime import driver

from trials.triton_on_volta import SHARED_MEMORY, Recorder, Volta, calls


def main() -> int:
    """Returns 0; what does not compile is in the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    driver.set_active(Volta())
    torch.cuda.get_device_name = lambda *_: "Tesla V100"
    torch.cuda.get_device_capability = lambda *_: (7, 0)
    recorder = Recorder()
    for recorder.used_for, call in calls().items():
        try:
            call()
        except Exception as error:
            # A kernel that was not run has left no result for the code after it, all its launches are recorded by then.
            print(f"{recorder.used_for}: {type(error).__name__}: {error}", file=sys.stderr)
            recorder.rows.append({"for": recorder.used_for, "stopped": f"{type(error).__name__}: {error}"})
    result = {
        "what": f"Triton kernels that vLLM {version('vllm')} runs for Qwen3.8-27B, compiled for sm_70 (a rank at TP=2)",
        "provenance": "computed",
        "command": "python scripts/triton_on_volta.py OUTPUT",
        "triton": triton.__version__,
        "shared_bytes_of_a_processor": SHARED_MEMORY,
        "kernels": recorder.rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
