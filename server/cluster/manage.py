"""`voltserve cluster status` and `stop`: asked of Ray in a process of its own."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

from server.errors import UserError

LIMIT = 120.0  # seconds; joining a cluster takes some


def need_ray() -> None:
    """Raises UserError where Ray is not installed. It is looked for, not imported."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed in this Python: run `make setup-ray`, or install voltserve[ray]")


def ask(what: str) -> dict[str, Any]:
    """What `on_ray.manage` says to `status` or `stop`.

    Raises:
        UserError: Ray cannot be reached, or does not answer.
    """
    need_ray()
    command = [sys.executable, "-m", "server.cluster.on_ray.manage", what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"Ray has not answered within {LIMIT:g} s; does `ray status` answer?") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word why"])[-1]
        raise UserError(last.removeprefix("voltserve: "))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def status_text(found: dict[str, Any]) -> str:
    """The status for people."""
    lines = []
    for node in found["nodes"]:
        sizes = {name: node["resources"].get(name, 0) for name in ("CPU", "GPU")}
        state = "alive" if node["alive"] else "dead"
        lines.append(f"node {node['host']}: {state}, " + ", ".join(f"{size:g} {name}" for name, size in sizes.items()))
    for model in found["models"]:
        counts = ", ".join(f"{count} {state.lower()}" for state, count in model["replicas"].items() if count)
        where = f" on {', '.join(model['hosts'])}" if model["hosts"] else ""
        lines.append(f"model {model['name']}: {model['status'].lower()}; replicas: {counts or 'none'}{where}")
        lines += [f"  {text}" for text in (model["message"], model["last_failure"]) if text]
    return "\n".join(lines) or "no nodes"
