"""`voltserve bench` and vLLM's own `vllm bench serve`, as two tools that measure the same server."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from server.bench.load import Closed
from server.bench.measures import summarize
from server.bench.prompts import Target
from server.bench.run import BenchSettings, run_bench

# Our figure, and its name in vLLM's result file; milliseconds there, seconds here.
FIGURES = {
    "tokens_per_s": ("output_throughput", 1.0),
    "ttft.p50": ("median_ttft_ms", 1e3),
    "tpot.p50": ("median_tpot_ms", 1e3),
    "itl.p50": ("median_itl_ms", 1e3),
    "e2e.p50": ("median_e2el_ms", 1e3),
}
ALLOWED = 0.05


def ours(target: Target, arguments: argparse.Namespace, round_number: int) -> dict[str, float]:
    """One measurement by voltserve bench."""
    level = Closed(arguments.concurrency)
    settings = BenchSettings(arguments.input_len, arguments.output_len, (level,), arguments.requests, seed=round_number)
    summary = summarize(run_bench(target, settings)[0]).as_dict()
    if summary["failed"]:
        sys.exit(f"voltserve bench: {summary['errors']}")
    flat = {
        f"{name}.{key}": entry for name, one in summary.items() if isinstance(one, dict) for key, entry in one.items()
    }
    return {name: (summary | flat)[name] for name in FIGURES}


class Theirs:
    """`vllm bench serve`, imported once and run repeatedly: one JSON list of arguments per line on its stdin."""

    PROGRAM = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print("DONE", flush=True)
"""

    def __init__(self, target: Target, arguments: argparse.Namespace, folder: Path) -> None:
        self._file = folder / "theirs.json"
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._arguments = ["--backend", "openai", "--base-url", target.url, "--model", target.model]
        self._arguments += ["--tokenizer", str(arguments.tokenizer), "--dataset-name", "random"]
        self._arguments += ["--random-input-len", str(arguments.input_len)]
        self._arguments += ["--random-output-len", str(arguments.output_len)]
        self._arguments += ["--num-prompts", str(arguments.requests), "--max-concurrency", str(arguments.concurrency)]
        self._arguments += ["--num-warmups", str(arguments.concurrency), "--ignore-eos", "--temperature", "0"]
        self._arguments += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm", "--save-result"]
        self._arguments += ["--result-dir", str(folder), "--result-filename", self._file.name]

    def measure(self, round_number: int) -> dict[str, float]:
        """One measurement. Its prompts are random tokens, decoded, and so have about the wanted length."""
        assert self._process.stdin is not None  # noqa: S101 — they are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._file.unlink(missing_ok=True)
        self._process.stdin.write(json.dumps([*self._arguments, "--seed", str(round_number)]) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line == "DONE\n":
                break
            said.append(line)
        if not self._file.exists():
            sys.exit("vllm bench serve failed:\n" + "".join(said[-50:]))
        value: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        if value["failed"]:
            sys.exit(f"vllm bench serve: {value['failed']} of {value['num_prompts']} requests failed")
        return {name: value[key] / scale for name, (key, scale) in FIGURES.items()}

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


def fake_model(folder: Path) -> Path:
    """A model directory for the tests' engine."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0")
    (folder / "fake.json").write_text(json.dumps({"answer": {"first_delay": 0.3, "delay": 0.03}}))
    return folder
