"""Joins this process to the cluster."""

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ray


def own_output() -> Callable[[Any], None]:
    """A function that writes an object as a line of JSON to what is stdout now; what Ray prints goes to stderr then."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: Any) -> None:
        print(json.dumps(message), file=stream, flush=True)

    return say


def connect() -> None:
    """Connects to the cluster that RAY_ADDRESS names, or whose node this machine is. Without one the process ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it warns of how versions are given
    warnings.simplefilter("ignore", FutureWarning)  # of what a later Ray will do otherwise
    try:
        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)  # a node that is just starting gives no text
        remedy = "start one with `ray start --head`, or join one with `ray start --address=HEAD:6379`"
        print(f"voltserve: no Ray node on this machine ({reason}): {remedy}", file=sys.stderr)
        raise SystemExit(2) from error


def shortened(message: str) -> str:
    """What Serve says, without its stack: the first line, and the last where there are more."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines() if line.strip()]
    if len(lines) <= 2 or "Traceback" not in message:
        return " ".join(lines)
    return f"{lines[0].partition(' Error: ')[0]} … {lines[-1]}"
