#!/usr/bin/env python3
"""Do `voltserve bench` and vLLM's own `vllm bench serve` agree? Both on one running server, in turn, round after round.

    .venv/bin/python -m scripts.bench_agreement docs/results/bench-agreement-DATE.json

The ratios are medians over rounds of the ratio in each, and who goes first alternates: a machine's load changes. With
`--fake` the server is the tests' engine, whose delays are scripted: what else the machine does changes little there.
"""

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.bench.load import Closed
from server.bench.measures import summarize
from server.bench.prompts import Target
from server.bench.run import BenchSettings, run_bench
from server.machine import describe_machine, today
from server.run.child import running

# Ours, and what the same thing is called in vLLM's result file; milliseconds there, seconds here.
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
    """`vllm bench serve`, imported once and run again and again: a list of arguments a line, in JSON, on its stdin."""

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
        """One measurement; its prompts are random tokens as well, decoded, and so of about the length asked for."""
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


def main() -> None:
    """Measures and writes the result file; exit code 1 where they disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-nvfp4"))
    parser.add_argument("--tokenizer", type=Path, default=Path("models/smollm2"))
    parser.add_argument(
        "--fake", action="store_true", help="the tests' engine: 300 ms to the first token, 30 ms a token"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    arguments = parser.parse_args()
    machine = describe_machine()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = fake_model(folder / "fake") if arguments.fake else arguments.model
        module = "tests.fakes.serve" if arguments.fake else "server"
        with running(["--model", str(model)], folder / "serve.log", module=module) as service:
            service.wait_until_ready()
            target = Target(service.url, str(model))
            with contextlib.closing(Theirs(target, arguments, folder)) as peer:
                peer.measure(arguments.rounds)  # its imports are done by then
                for number in range(arguments.rounds):
                    tools: list[tuple[str, Callable[[], dict[str, float]]]] = [
                        ("ours", functools.partial(ours, target, arguments, number)),
                        ("theirs", functools.partial(peer.measure, number)),
                    ]
                    one = {who: measure() for who, measure in (tools if number % 2 else reversed(tools))}
                    rounds.append(one)
                    print(json.dumps(one), flush=True)
    medians = {
        who: {figure: statistics.median(one[who][figure] for one in rounds) for figure in FIGURES}
        for who in ("ours", "theirs")
    }
    ratios = {
        figure: statistics.median(one["ours"][figure] / one["theirs"][figure] for one in rounds) for figure in FIGURES
    }
    result = {
        "what": "voltserve bench beside vllm bench serve 0.28.0 on one server, in turn; seconds, tokens a second",
        "provenance": "measured",
        "date": today(),
        "command": "scripts/bench_agreement.py " + " ".join(sys.argv[1:]),
        "machine": machine,
        "server": "the tests' engine behind the gateway, delays scripted" if arguments.fake else f"serve {model}",
        "load": f"{arguments.requests} requests of {arguments.input_len} + {arguments.output_len} tokens, "
        f"{arguments.concurrency} users, {arguments.rounds} rounds",
        "ours_over_theirs": {figure: round(ratio, 4) for figure, ratio in ratios.items()},
        "medians": medians,
        "rounds": rounds,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["ours_over_theirs"], indent=2))
    if off := [figure for figure, ratio in ratios.items() if abs(ratio - 1) > ALLOWED]:
        sys.exit(f"more than {ALLOWED:.0%} apart: {', '.join(off)}")


def fake_model(folder: Path) -> Path:
    """A model directory for the tests' engine."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0")
    (folder / "fake.json").write_text(json.dumps({"answer": {"first_delay": 0.3, "delay": 0.03}}))
    return folder


if __name__ == "__main__":
    main()
