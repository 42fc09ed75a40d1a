"""Compiles for sm_70, without a GPU, the Triton kernels that vLLM runs on a V100, and those that ours replace.

    python -m scripts.triton_on_volta docs/results/triton-sm70-DATE.json

vLLM's own functions are called on CPU tensors (trials/triton_calls.py). Where they launch a kernel, Triton compiles it
for a V100, and nothing runs. An autotuned kernel is compiled for each block size with most warps. The result has, per
kernel, registers, spilled bytes, shared memory and matrix products (`tt.dot`). It also counts fused multiply-adds and
tensor core instructions in the machine code. `fails` and `spills` name the kernels on the path that do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with which vLLM does not ask for a GPU before it imports Triton

import torch
import triton
from triton.runtime import driver
from vllm.platforms import current_platform

from trials.triton_calls import Calls, on_path, replaced
from trials.triton_on_volta import SHARED_MEMORY, Recorder, Volta


def compiled(recorder: Recorder, calls: Calls) -> list[dict[str, Any]]:
    """What the compiler made of each kernel that is launched."""
    before = len(recorder.rows)
    for recorder.used_for, call in calls.items():
        launched = recorder.launched
        try:
            call()
        except Exception as error:
            # A kernel that was not run has left no result for the code after it, all its launches are recorded by then.
            print(f"{recorder.used_for}: {type(error).__name__}: {error}", file=sys.stderr)
            recorder.rows.append({"for": recorder.used_for, "stopped": f"{type(error).__name__}: {error}"})
        if recorder.launched == launched:
            recorder.rows.append({"for": recorder.used_for, "stopped": "expected a kernel to be launched, got none"})
    return recorder.rows[before:]


def names(rows: list[dict[str, Any]], key: str) -> list[str]:
    """Kernels whose `key` is set, each once."""
    return list(dict.fromkeys(str(row.get("kernel", row["for"])) for row in rows if row.get(key)))


def main() -> int:
    """Returns 0; what does not compile is in the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    driver.set_active(Volta())
    torch.cuda.get_device_name = lambda *_: "Tesla V100"
    torch.cuda.get_device_capability = lambda *_: (7, 0)
    # Where vLLM takes itself to be on a CPU, it has put functions in the place of some that launch kernels.
    type(current_platform).is_cpu = lambda _: False
    recorder = Recorder()
    path, ours = compiled(recorder, on_path()), compiled(recorder, replaced())
    result = {
        "what": f"Triton kernels that vLLM {version('vllm')} runs on a V100, and those that ours replace, for sm_70",
        "provenance": "computed",
        "command": f"python -m scripts.triton_on_volta {arguments.output}",
        "triton": triton.__version__,
        "shared_bytes_of_a_processor": SHARED_MEMORY,
        "fails": names(path, "fails") + names(path, "stopped"),
        "spills": names(path, "spilled_bytes"),
        "kernels": path,
        "replaced": ours,
    }
    arguments.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
