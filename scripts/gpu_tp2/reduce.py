"""Times all-reduces between ranks, ours and NCCL's side by side: reduce.py OUTPUT.json [--library FILE.so]

A layer has two of them, of M x hidden numbers for M tokens. Each way runs in processes of its own: `shared`, through
the host's memory (NCCL_P2P_DISABLE=1), and `peer`, through the GPUs' own. Sums are checked first (reduce_check.py).
Times are medians of one call among many, one after the other; in a graph they say what the GPUs need.
"""

import argparse
import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

import torch

from trials.reduce_times import HIDDEN, TOKENS, WAYS, dead_main, rank_main, run, slower, sums_main


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: NCCL's part on CPUs, a dry run"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--repeats", type=int, default=100_000, help="of checked calls")
    parser.add_argument("--sums-only", action="store_true", help="for compute-sanitizer: no graphs, no times, no NCCL")
    parser.add_argument("--library", type=Path, help="the ops, instead of voltserve_kernels'")
    parser.add_argument(
        "--sweep", type=Path, help="libvoltserve_cuda.so: also time protocols and blocks that are not planned"
    )
    parser.add_argument("--limit", type=float, default=90, help="seconds of one way")
    arguments = parser.parse_args()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if arguments.library:
        torch.ops.load_library(str(arguments.library))
    elif arguments.backend == "nccl":
        import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
    result: dict[str, Any] = {
        "what": f"all-reduces of M x {HIDDEN} numbers between {arguments.ranks} ranks",
        "provenance": "measured",
        "command": " ".join(sys.argv),
        "numbers": "float32, 4 bytes" if arguments.backend == "gloo" else "float16, 2 bytes",
        "nccl": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "ways": {},
    }
    for way in arguments.ways:
        try:
            if arguments.sums_only:
                result["ways"][way] = {"sums_only": list(run(way, sums_main, arguments).values())}
            else:
                result["ways"][way] = slower(run(way, rank_main, arguments))
                if arguments.backend == "nccl":
                    result["ways"][way]["dead_rank"] = run(way, dead_main, arguments)[0]
        except (RuntimeError, queue.Empty) as error:  # the other way may work
            result["ways"].setdefault(way, {})["error"] = str(error) or f"no answer within {arguments.limit:g} s"
        finally:
            arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(way, json.dumps(result["ways"][way]), flush=True)


if __name__ == "__main__":
    main()
