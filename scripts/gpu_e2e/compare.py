"""Compares what two engines answered (answers.py): `compare.py REFERENCE.json OTHER.json OUTPUT.json [--device NAME]`.

Greedy texts must be equal, with two exceptions. The reference held both tokens for almost equally likely, so that
rounding decides. Or --routing, a file of routing.py, says that a router's near tie parted these texts at this token.
Perplexities must agree within half a percent. The exit code is 1 if something does not agree.
"""

import argparse
import json
import sys
from pathlib import Path

from trials.compare import compare


def main() -> int:
    """Writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--what", default="the CPU engine's answers and the GPU engine's")
    parser.add_argument("--device", required=True)
    parser.add_argument("--command", required=True, help="with which the answers were asked for")
    parser.add_argument("--routing", type=Path, help="what routing.py judged of the same models")
    arguments = parser.parse_args()
    reference, other = (json.loads(path.read_text()) for path in (arguments.reference, arguments.other))
    head = {
        "what": arguments.what,
        "provenance": "measured",
        "device": arguments.device,
        "command": arguments.command,
        "flags": other["flags"],
        "start_seconds": other["start_seconds"],
    }
    routing = json.loads(arguments.routing.read_text()) if arguments.routing else None
    result = head | compare(reference, other, routing) | {"decisions": other["decisions"]}
    arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
