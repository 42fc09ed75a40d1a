"""Measures decoding of a large model in one engine: eager and CUDA graphs, our GEMMs and the reference way.

    python -m scripts.gpu_e2e.measure MODEL OUTPUT [--make SHAPE] [--eager] [--streams 1 8 16 32] [--tokens 64]
        [--library FILE.so] …

    --make      writes MODEL first, of a shape of synthetic.py, while vLLM is imported
    --library   libvoltserve_cuda.so; its kernel that only reads is the yardstick
    --eager     recorded and fused steps, as `serve --enforce-eager` has them, in turns with steps of the model's
                modules; without it, eager steps are of the modules

The ways are

    kernels     as it is served
    unfused     the model's modules captured, neither recorded nor fused
    nccl        with NCCL's all-reduces in place of ours
    reference   the modules, with each weight dequantized to float16 and multiplied by cuBLAS on every call

Everything else is the same, in one process. Prompts are random. Profiles are last, because a process launches kernels
more slowly after torch's profiler has run.
"""

import argparse
import asyncio
from pathlib import Path

from lookalikes.decoder_checkpoints import SHAPES
from trials.decoding import run
from trials.decoding_ways import WAYS


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--make", choices=SHAPES)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--cache-bytes", type=int, help="the cache's; else it follows from --memory")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--only-graphs", action="store_true", help="no eager steps beside graphs")
    parser.add_argument("--attention", help="vLLM's name of the attention backend; else the platform's choice")
    parser.add_argument("--nccl", action="store_true", help="for every all-reduce")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel GPUs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kernels", "reference"])
    arguments = parser.parse_args()
    if arguments.eager and "reference" in arguments.ways:
        parser.error("--eager: expected --ways without reference, since a recorded step keeps how it multiplies")
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
