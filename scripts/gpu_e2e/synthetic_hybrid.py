"""Writes a random checkpoint with the names, dtypes and shapes of Qwen3.8-27B-QUASAR-NVFP4, less its vision tower.

    python -m scripts.gpu_e2e.synthetic_hybrid DIRECTORY [--layers 64] [--device cuda]

The tower is declared in config.json, as is the MTP layer, whose tensors the original lacks too; an engine that serves
text only loads neither.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from lookalikes.hybrid_checkpoint import write
from lookalikes.quasar_config import ORIGINAL


def main() -> None:
    """Prints the bytes written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=ORIGINAL.layers)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(write(replace(ORIGINAL, layers=arguments.layers), arguments.directory, arguments.device))


if __name__ == "__main__":
    main()
