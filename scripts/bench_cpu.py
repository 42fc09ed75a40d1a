"""Tokens per second on this CPU, through HTTP: ours, stock vLLM on the 16-bit model, and llama.cpp, side by side.

    .venv/bin/python -m scripts.bench_cpu docs/results/cpu-DATE.json --llama build/llama.cpp

One server is up at a time, because an idle one still takes its share of cores and caches. Each round starts, warms,
measures and ends every server in turn, so that other load on the machine affects all alike. Ratios are of medians over
all measurements. llama.cpp is left out if no folder for it is named. In a new folder its build takes ten minutes. The
result also has the NVFP4 kernel's GB/s against the read ceiling.
"""

import argparse
import json
import tempfile
from pathlib import Path

from trials.cpu_kernels import kernels
from trials.cpu_report import plot, report
from trials.cpu_servers import REPEATS, STREAMS, measure, running, servers, stream


def main() -> None:
    """Measures and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dense-dtypes", nargs="*", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's folder, made where it is not there")
    arguments = parser.parse_args()
    compared = servers(arguments)
    kernel = kernels()
    with tempfile.TemporaryDirectory() as logs:
        for number in range(arguments.rounds):
            for server in compared:
                with running(server, Path(logs)):
                    stream(server, 0)
                    for repeat in range(REPEATS):
                        for streams in STREAMS:
                            measure(server, streams, first=1000 * number + 100 * repeat + 1)
                told = {
                    streams: [round(rate, 1) for rate in rates[-REPEATS:]] for streams, rates in server.rates.items()
                }
                print(f"{server.name}: ready after {server.ready_s[-1]} s, {told} tokens per second", flush=True)
    result = report(compared, kernel, arguments)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    arguments.output.with_suffix(".svg").write_text(plot(result), encoding="utf-8")
    print(json.dumps(result["ratios"], indent=2))


if __name__ == "__main__":
    main()
