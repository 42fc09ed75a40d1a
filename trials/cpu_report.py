"""What scripts/bench_cpu.py writes: the result file, and bars as SVG."""

import argparse
import os
import platform
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path

from trials.cpu_servers import REPEATS, STREAMS, TOKENS, Server


def report(compared: list[Server], kernel: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    """The result file's contents."""
    ours = compared[0]
    dense = [server for server in compared if server.name.startswith("vLLM")]
    peers = {"vLLM's best dtype": dense, "llama.cpp": [one for one in compared if one.name.startswith("llama")]}
    ratios = {
        f"x{streams} over {name}": round(ours.median(streams) / max(one.median(streams) for one in group), 2)
        for streams in STREAMS
        for name, group in peers.items()
        if group
    }
    return {
        "what": "SmolLM2-135M through HTTP: tokens per second by number of streams",
        "how": "one server up at a time, in turn, round after round; medians of all measurements",
        "provenance": "measured",
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "command": "scripts/bench_cpu.py " + " ".join(map(str, sys.argv[1:])),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {cpu_model()}",
        "load_average": os.getloadavg(),
        "tokens_a_stream": TOKENS,
        "rounds": arguments.rounds,
        "measurements_a_round": REPEATS,
        "ratios": ratios,
        "servers": [
            {
                "name": server.name,
                "ready_s": statistics.median(server.ready_s),
                **{f"x{streams}": round(server.median(streams), 1) for streams in STREAMS},
                "measurements": {
                    f"x{streams}": [round(rate, 1) for rate in server.rates[streams]] for streams in STREAMS
                },
            }
            for server in compared
        ],
        "kernel": kernel,
    }


def plot(result: dict[str, object]) -> str:
    """The servers' tokens per second as bars, in SVG."""
    rows = [(server["name"], streams, server[f"x{streams}"]) for streams in STREAMS for server in result["servers"]]  # type: ignore[attr-defined]
    widest = max(rate for *_, rate in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{24 * len(rows) + 40}" font-family="sans-serif">'
    ]
    lines.append(f'<text x="8" y="20" font-size="14">{result["what"]}, {result["date"]}</text>')
    for index, (name, streams, rate) in enumerate(rows):
        y, width = 36 + 24 * index, round(330 * rate / widest)
        color = "#1f6f50" if name.startswith("voltserve") else "#9aa5b1"
        lines.append(f'<text x="8" y="{y + 13}" font-size="12">{name}, ×{streams}</text>')
        lines.append(f'<rect x="220" y="{y}" width="{width}" height="16" fill="{color}"/>')
        lines.append(f'<text x="{226 + width}" y="{y + 13}" font-size="12">{rate}</text>')
    return "\n".join([*lines, "</svg>", ""])


def cpu_model() -> str:
    """As the system names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
