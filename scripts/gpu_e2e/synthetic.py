"""Writes a random NVFP4 checkpoint of a known model's shapes: `synthetic.py SHAPE DIRECTORY [--twin] [--device cuda]`.

Names, dtypes and layout are those of compressed-tensors; the numbers are random, with weights of standard deviation
about 1/sqrt(K), so that activations stay in float16's range. --twin writes the same weights in float16 instead.
--device meta writes files of the right names, headers and sizes without the numbers: enough for `voltserve plan`.
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
