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
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from server.bench.prompts import Target
from server.machine import describe_machine, today
from server.run.child import running
from trials.bench_peers import ALLOWED, FIGURES, Theirs, fake_model, ours


def main() -> None:
    """Measures and writes the result file; exit code 1 where they disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-nvfp4"))
    parser.add_argument("--tokenizer", type=Path, default=Path("models/smollm2"))
    parser.add_argument(
        "--fake", action="store_true", help="the tests' engine: 300 ms to the first token, 30 ms per token"
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
        "what": f"voltserve bench beside vllm bench serve {version('vllm')} on one server; seconds, tokens per second",
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


if __name__ == "__main__":
    main()
