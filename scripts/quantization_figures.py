"""Perplexity and KL divergence of every quantization method on a small model, as docs/results/quantization-*.json.

    .venv/bin/python scripts/quantization_figures.py models/smollm2 build/figures docs/results/quantization-DATE.json

Models are made in the second folder; those that are there from an earlier run are measured as they are. With
`--text FILE` they are measured on that text too.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from quant.calibrate import CalibrationSettings
from quant.calibration_text import calibration_text, evaluation_text
from quant.evaluate.local import load_local
from quant.evaluate.text import measure_text
from quant.formats.quantize_config import SCALE_POLICIES
from quant.jsonfile import read_object, write_object
from quant.methods import Method
from quant.progress import Progress
from quant.quantize import quantize_checkpoint

METHODS = tuple(Method(policy, compensate) for compensate in (False, True) for policy in SCALE_POLICIES)
_TIMES = "seconds.json"


def make(source: Path, folder: Path, method: Method) -> dict[str, float]:
    """Quantizes `source` into `folder` unless it is there. The seconds that each step took, calibration included."""
    if folder.exists():
        return {
            name: float(str(seconds)) for name, seconds in read_object(folder / _TIMES, "Remove the folder").items()
        }
    started: dict[str, tuple[float, float]] = {}

    def note(progress: Progress) -> None:
        first, _ = started.get(progress.what, (time.monotonic(), 0.0))
        started[progress.what] = (first, time.monotonic())

    quantize_checkpoint(source, folder, method=method, on_progress=note)
    seconds = {what: round(last - first, 1) for what, (first, last) in started.items()}
    write_object(folder / _TIMES, seconds)
    return seconds


def main() -> None:
    """Makes, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="16-bit model directory")
    parser.add_argument("folder", type=Path, help="where quantized models are made")
    parser.add_argument("result", type=Path, nargs="?", help="JSON file to write; without it models are made only")
    names = [method.name for method in METHODS]
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="methods, if not all")
    parser.add_argument("--text", type=Path, help="a second text to measure on")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of each text")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    methods = [method for method in METHODS if method.name in arguments.only]
    seconds = {}
    for method in methods:
        seconds[method.name] = make(arguments.source, arguments.folder / method.name, method)
        console.print(method.name, seconds[method.name])
    if arguments.result is None:
        return
    reference = load_local(arguments.source)
    models = {method.name: load_local(arguments.folder / method.name) for method in methods}
    texts = [evaluation_text(), *([evaluation_text(arguments.text)] if arguments.text else [])]
    measured = []
    for text in texts:
        results = measure_text(
            {"16-bit": reference, **models},
            text,
            reference=reference,
            tokens=arguments.tokens,
            on_progress=console.print,
        )
        measured.append(
            {"text": text.source, "sha256": text.sha256, "models": {name: asdict(one) for name, one in results.items()}}
        )
    calibration = CalibrationSettings(calibration_text())
    write_object(
        arguments.result,
        {
            "provenance": "measured",
            "date": datetime.now(timezone.utc).date().isoformat(),
            "command": shlex.join([".venv/bin/python", *sys.argv]),
            "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, {platform.system()}",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers")},
            },
            "calibration": {
                "text": calibration.text.source,
                "sha256": calibration.text.sha256,
                "windows": calibration.windows,
                "window_tokens": calibration.window_tokens,
                "seed": calibration.seed,
            },
            "seconds": seconds,
            "measured": measured,
        },
    )
    console.print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
