"""Tries engine/triton_driver.py on a GPU: right results without a compiler, and its time beside Triton's own launchers.

    PYTHONPATH=. python scripts/gpu_triton_driver.py docs/results/triton-driver-DATE.json

Two processes run the same kernels with empty caches: one without a compiler, with our driver; one with Triton's.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from trials.triton_driver import _in_a_process, trial


def main() -> None:
    """Writes the results; exits with 1 where ours is wrong or compiled anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--driver", choices=("ours", "Triton's"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.driver:
        print(json.dumps(trial(arguments.driver)))
        return
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": "python -m scripts.gpu_triton_driver FILE",
        "provenance": "measured",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}",
        **{driver: _in_a_process(driver) for driver in ("ours", "Triton's")},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    ours = report["ours"]
    sys.exit("failed" in ours or set(ours["cases"].values()) != {"right"} or bool(ours["compiled_from_c"]))


if __name__ == "__main__":
    main()
