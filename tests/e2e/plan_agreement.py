"""The memory plan beside what the real engine reports, for several models, formats and splits, on the CPU.

    .venv/bin/python -m tests.e2e.plan_agreement --out docs/results/plan-DATE.json [NAME…]

Each case starts `voltserve serve`, waits until it is ready, and runs `voltserve plan --against` on its log.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lookalikes import quasar
from lookalikes.random_models import MIXTRAL, QWEN3, QWEN3_MOE, Architecture, formats, write_model, write_tokenizer

ROOT = Path(__file__).parents[2]
VOLTSERVE = str(Path(sys.executable).with_name("voltserve"))
START_LIMIT_S = 240  # a bound on a hang, not a check of speed


@dataclass(frozen=True)
class Case:
    """A model and its flags. Of the random models only their `architecture` and `form` count."""

    name: str
    model: str = ""
    flags: tuple[str, ...] = ()
    architecture: Architecture | None = None
    form: str = ""

    def prepare(self, folder: Path) -> str:
        """The model's directory."""
        made = folder / self.name
        if self.architecture is not None:
            write_model(made, folder / f"{self.name}-twin", self.architecture, self.form)
            write_tokenizer(made)
        elif self.model == "look-alike":
            quasar.write(made)
        elif self.form:
            subprocess.run([VOLTSERVE, "convert", self.model, str(made), "--format", self.form], cwd=ROOT, check=True)
        else:
            return self.model
        return str(made)


SHORT = ("--max-model-len", "128")
TWO = (*SHORT, "--tensor-parallel-size", "2")
QUASAR = ("--quantization", formats("")["quasarnvfp4"].quantization)
CASES = (
    Case("smollm2", "models/smollm2"),
    Case("smollm2-nvfp4", "models/smollm2-nvfp4"),
    Case("smollm2-modelopt", "models/smollm2-nvfp4", form="modelopt"),
    Case("qwen3-quasarnvfp4", flags=(*SHORT, *QUASAR), architecture=QWEN3, form="quasarnvfp4"),
    Case("qwen3-tp2", flags=TWO, architecture=QWEN3, form="compressed-tensors"),
    Case("qwen3-moe", flags=SHORT, architecture=QWEN3_MOE, form="compressed-tensors"),
    Case("mixtral-tp2", flags=TWO, architecture=MIXTRAL, form="modelopt"),
    Case("qwen3.5-look-alike", "look-alike", SHORT),
)


def report(case: Case, folder: Path) -> dict[str, Any]:
    """Starts a case and compares."""
    flags = ["--model", case.prepare(folder), *case.flags]
    log = folder / f"{case.name}.log"
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "2" in case.flags else dict(os.environ)
    with log.open("wb") as out:
        command = [VOLTSERVE, "serve", *flags, "--port", "0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not re.search(r"state=ready|given up|restart scheduled", text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    said = {"case": case.name, "flags": flags[1:]}
    if "state=ready" not in text:
        return {**said, "failed": [line for line in text.splitlines() if "rror" in line][-3:]}
    plan = [VOLTSERVE, "plan", *flags, "--against", str(log), "--json"]
    done = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    if not done.stdout:
        return {**said, "failed": done.stderr.splitlines()[-1:]}
    return {**said, "figures": json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; all by default")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if args.names and case.name not in args.names:
                continue
            reports.append(report(case, Path(folder)))
            print(json.dumps(reports[-1]), flush=True)
            result = {
                "kind": "measured",
                "date": date.today().isoformat(),
                "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
                "command": " ".join(["python -m tests.e2e.plan_agreement", *sys.argv[1:]]),
                "tolerance": 0.05,
                "cases": reports,
            }
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
