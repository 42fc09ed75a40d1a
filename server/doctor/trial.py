"""Runs the programs of `engine.probes` under a time limit. A trial may hang; then all its processes are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

P2P = ("-m", "engine.probes.p2p")
ALL_REDUCE = ("-m", "engine.probes.all_reduce")
LIMIT = 90.0  # seconds; importing torch and creating contexts on four GPUs takes up to 30


@dataclass(frozen=True)
class Trial:
    """A trial's result: the program's `answer`, or the `problem` with its last line where it failed."""

    answer: dict[str, Any] = field(default_factory=dict)
    timed_out: bool = False
    problem: str = ""


def run_trial(arguments: Sequence[str], limit: float = LIMIT) -> Trial:
    """Starts this Python with `arguments`, in a process group that is killed at the limit."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return Trial(timed_out=True, problem=f"no answer within {limit:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = output.strip().splitlines() or [""]
    if process.returncode:
        return Trial(problem=f"exited with {process.returncode}: {lines[-1]}")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        return Trial(problem=f"expected one JSON object as its last line, got {lines[-1]!r}")
    return Trial(answer=answer)
