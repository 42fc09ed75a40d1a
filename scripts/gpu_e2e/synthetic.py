"""Writes a random NVFP4 checkpoint of a known model's shapes: `synthetic.py SHAPE DIRECTORY [--twin] [--device cuda]`.

lookalikes/checkpoint_writer.py describes its numbers, and device `meta`. --twin writes the same weights in float16.
"""

import argparse
from pathlib import Path

from lookalikes.decoder_checkpoints import SHAPES, write


def main() -> None:
    """Prints the bytes written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--twin", action="store_true")
    arguments = parser.parse_args()
    print(write(SHAPES[arguments.shape], arguments.directory, arguments.device, twin=arguments.twin))


if __name__ == "__main__":
    main()
