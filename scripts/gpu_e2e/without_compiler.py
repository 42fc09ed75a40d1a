"""Compares an engine without a C compiler in its PATH with one that has it: answers, and the Triton kernels that ran.

    python -m scripts.gpu_e2e.without_compiler MODEL QUESTIONS OUTPUT.json

Both engines of a pair run at once on one GPU, eagerly and then in CUDA graphs, each with an empty Triton cache. Each
continues answers.py's prompts greedily, one after another. It then draws 16 samples of one prompt, whose top-k and
top-p vLLM masks with Triton. The exit code is 1 if the answers differ, or if C was compiled after all.
"""

import argparse
import collections
import datetime
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trials.served import Engine, serve

COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|c89|c99|cc1|cc1plus|clang|clang\+\+|tcc|nvcc)(-[\d.]+)?(-gcc|-cc)?")
FLAGS = (
    *("--dtype", "float16", "--max-model-len", "2048", "--max-num-seqs", "32"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "1073741824"),
)
WAYS = {"eager": ("--enforce-eager",), "graphs": ()}
TOKENS = 32


def folder_without_compilers(folder: Path) -> str:
    """A PATH of one folder: links to every program of today's PATH that is no compiler."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def ask(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """The texts, and how many tokens the samples have."""
    body = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True}
    greedy = [engine.post("/v1/completions", body | {"prompt": one, "temperature": 0}) for one in prompts]
    sampling = {"prompt": prompts[0], "n": 16, "temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 1}
    sampled = engine.post("/v1/completions", body | sampling)
    return {
        "greedy": [answer["choices"][0]["text"] for answer in greedy],
        "sampled_tokens": sampled["usage"]["completion_tokens"],
    }


def run(model: Path, prompts: list[list[int]], way: str, path: str | None, work: Path) -> dict[str, Any]:
    """One engine, started, asked and stopped; `path`: its PATH, or None for ours."""
    name = f"{way}-{'with' if path is None else 'without'}-compiler"
    cache = work / f"{name}-triton"
    environment = {"TRITON_CACHE_DIR": str(cache), "VLLM_CACHE_ROOT": str(work / f"{name}-vllm")}
    if path is not None:
        environment["PATH"] = path
    with serve(model, (*FLAGS, *WAYS[way]), work / f"{name}.log", environment) as engine:
        answers = ask(engine, prompts)
    kernels = collections.Counter(file.stem for file in cache.rglob("*.cubin"))
    return {
        "start_seconds": engine.start_seconds,
        "launchers": [one["choice"] for one in engine.decisions if one["what"].startswith("launchers")],
        "triton_kernels": dict(sorted(kernels.items())),
        "compiled_from_c": sorted(file.name for file in cache.rglob("*.so")),
        **answers,
    }


def main() -> None:
    """Both ways; writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    prompts = json.loads(arguments.questions.read_text())["prompts"][:8]
    work = arguments.output.parent
    os.environ.pop("CC", None)
    import torch

    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": "python -m scripts.gpu_e2e.without_compiler MODEL QUESTIONS FILE",
        "provenance": "measured; random weights in SmolLM2's shapes",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, treated as a V100",
    }
    wrong = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        bare = folder_without_compilers(Path(folder))
        for way in WAYS:
            has, lacks = pool.map(lambda path, way=way: run(arguments.model, prompts, way, path, work), (None, bare))
            equal = has.pop("greedy") == lacks.pop("greedy")
            report[way] = {"greedy_texts_equal": equal, "with_a_compiler": has, "without": lacks}
            print(json.dumps({way: report[way]}), flush=True)
            if not equal or lacks["compiled_from_c"] or set(lacks["launchers"]) != {"engine.triton_driver"}:
                wrong.append(way)
            arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(f"not as expected: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
