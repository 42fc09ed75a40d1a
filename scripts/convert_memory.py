"""Measures the memory that `voltserve convert` holds: a model of 5 GB in two shards, to ModelOpt's format and back.

python -m scripts.convert_memory --out docs/results/convert-memory.json
"""

import argparse
import datetime
import json
import platform
import tempfile
from pathlib import Path

from scripts import verify_large


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    verify_large.LAYERS, verify_large.VOCAB, verify_large.SHARDS = 24, 1024, 2
    with tempfile.TemporaryDirectory() as folder:
        source, there, back = (Path(folder) / name for name in ("source", "there", "back"))
        source.mkdir()
        size = verify_large.write_sparse(source)
        largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
        runs = [
            verify_large.timed("convert", str(source), str(there), "--format", "modelopt"),
            verify_large.timed("convert", str(there), str(back), "--format", "compressed-tensors"),
        ]
    peak = max(run[1] for run in runs) * 1024
    result = {
        "what": "peak resident memory of voltserve convert, the source's mapped pages included",
        "provenance": "measured",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": "python -m scripts.convert_memory",
        "machine": f"{platform.machine()}, 2 cores, Python {platform.python_version()}",
        "bytes": size,
        "largest_shard_bytes": largest,
        "peak_bytes": peak,
        "beyond_the_largest_shard_bytes": peak - largest,
        "seconds": [round(run[0], 1) for run in runs],
        "exits": [run[2] for run in runs],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
