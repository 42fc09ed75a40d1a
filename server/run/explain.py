"""`voltserve explain`: shows what serve would do, without starting anything."""

import os
import shlex
from pathlib import Path
from typing import Any

from server.config.render import ALWAYS, is_inherited, overridden, render_launch
from server.config.settings import Config, setting_flags
from server.decisions import Decision, costly
from server.errors import PreflightError
from server.run import preflight
from server.run.engine_decisions import engine_decisions

RUNTIME = Path("RUNTIME")  # stands for the private folder that serve makes


def explain(config: Config) -> dict[str, Any]:
    """Settings and engine flags with their sources, decisions with reasons, the engine's command and environment.

    `problem` would stop `serve`, or is None; `exit_code` is the exit code it would end with. Inherited variables are
    listed by name only; they are the user's.
    """
    own = {name: getattr(config, name.replace("-", "_")) for name in setting_flags()}
    values = {**own, **config.engine}
    launch = render_launch(config, RUNTIME)
    checked, problem, code = _preflight(config)
    engine, _ = engine_decisions(config)  # what of it stops serve, the preflight says
    inherited = sorted(name for name in os.environ if is_inherited(name) and name not in ALWAYS)
    decisions = (*config.decisions, *overridden(config), *checked, *engine)
    return {
        "settings": {name: {"value": values[name], "source": config.sources[name]} for name in own},
        "engine_flags": {
            name: {"value": config.engine[name], "source": config.sources[name]} for name in sorted(config.engine)
        },
        "decisions": [vars(decision) for decision in decisions],
        "warnings": costly(decisions),
        "devices": [vars(device) for device in config.devices.gpus] or config.devices.reason,
        "engine_command": list(launch.argv),
        "engine_environment": {name: value for name, value in sorted(launch.env.items()) if name not in inherited},
        "engine_inherits": inherited,
        "problem": problem,
        "exit_code": code,
    }


def _preflight(config: Config) -> tuple[tuple[Decision, ...], str | None, int]:
    """The decisions of `serve` before it starts the engine, the problem that would stop it, and the exit code."""
    try:
        return preflight.check(config), None, 0
    except PreflightError as error:
        return (), str(error), error.exit_code


def as_text(explained: dict[str, Any]) -> str:
    """The same for people."""
    lines = []
    for title, part in (("settings", "settings"), ("engine flags", "engine_flags")):
        lines.append(f"{title}:")
        rows = [(f"--{name}", str(entry["value"]), entry["source"]) for name, entry in explained[part].items()]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines += [f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]
    lines.append("decisions:")
    lines += [f"  {one['what']}: {one['choice']} ({one['reason']})" for one in explained["decisions"]]
    lines += [f"WARNING: {warning}" for warning in explained["warnings"]]
    lines += ["engine command:", f"  {shlex.join(explained['engine_command'])}", "engine environment:"]
    lines += [f"  {name}={value}" for name, value in explained["engine_environment"].items()]
    lines.append(f"  inherited: {', '.join(explained['engine_inherits'])}")
    lines.append(f"serve would refuse: {explained['problem']}" if explained["problem"] else "serve would start.")
    return "\n".join(lines)
