"""Feeds the safetensors header reader hostile files and writes the outcome.

python -m tests.faults.fuzz_headers --inputs 200000 --out docs/results/header-fuzz.json
"""

import argparse
import datetime
import hashlib
import json
import platform
import time
from pathlib import Path

from tests.quant.hostile_headers import BYTES_PER_BYTE, FIXED_BYTES, check_header, hostile_file


def main() -> None:
    """Runs, and raises what the first failing input raises, naming its number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    accepted = 0
    distinct: set[bytes] = set()
    started = time.monotonic()
    for number in range(arguments.first, arguments.first + arguments.inputs):
        raw = hostile_file(number)
        distinct.add(hashlib.blake2b(raw, digest_size=8).digest())
        try:
            accepted += check_header(raw)
        except Exception as error:
            error.args = (f"input {number}: {error}",)
            raise
    result = {
        "what": "quant.safetensors_header.parse_header on generated hostile files; tests/quant/hostile_headers.py says "
        "what had to hold of each: no error but HeaderError, memory within the bound, nothing accepted that the "
        "safetensors library does not read alike",
        "provenance": "measured",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": f"python -m tests.faults.fuzz_headers --inputs {arguments.inputs} --first {arguments.first}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "inputs": arguments.inputs,
        "distinct_inputs": len(distinct),
        "accepted": accepted,
        "refused": arguments.inputs - accepted,
        "failures": 0,
        "memory_bound": f"{FIXED_BYTES} bytes + {BYTES_PER_BYTE} times the file's size",
        "seconds": round(time.monotonic() - started, 1),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
