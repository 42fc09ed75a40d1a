"""Whether two engines' texts part because routers held two experts for almost equal.

    python -m scripts.gpu_e2e.routing ask QUESTIONS MODEL RECORD --other RECORD [engine flags …]
    python -m scripts.gpu_e2e.routing judge REFERENCE_RECORD OTHER_RECORD OUTPUT.json --device NAME --command COMMAND

trials/routing.py explains how near ties part texts.

`ask` runs for both engines at once. It continues answers.py's prompts greedily, one after another, and keeps every
router's logits. Then it reads the other engine's texts twice: with experts of its own choice, and with those of the
other engine. In the second case only rounding differs. Modules are watched, so the step must be eager and not recorded
(TORCH_COMPILE_DISABLE=1).
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from trials.routing import judge
from trials.routing_engine import ask


def main() -> int:
    """Asks, or judges and exits with 1 where a text parts for no reason that the routers give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("questions", type=Path)
    asking.add_argument("model", type=Path)
    asking.add_argument("record", type=Path)
    asking.add_argument("--other", type=Path, required=True, help="the record that the other engine writes")
    judging = commands.add_parser("judge")
    judging.add_argument("reference", type=Path)
    judging.add_argument("other", type=Path)
    judging.add_argument("output", type=Path)
    judging.add_argument("--device", required=True)
    judging.add_argument("--command", required=True)
    arguments, flags = parser.parse_known_args()
    if "questions" in arguments:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        ask(arguments, flags)
        return 0
    reference, other = (torch.load(path, weights_only=True) for path in (arguments.reference, arguments.other))
    head = {
        "what": "a random mixture of experts on our kernels and its dequantized twin on vLLM's: what routers chose",
        "provenance": "measured",
        "device": arguments.device,
        "command": arguments.command,
        "flags": other["flags"],
    }
    result = head | judge(reference, other)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
