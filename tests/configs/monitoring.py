"""What the dashboard and the alert rules ask of Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana/dashboards/voltserve.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((CONFIGS / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Prometheus's own: a target's reachability, and alerts.
PROMETHEUS_OWN = {"up", "ALERTS"}

_METRIC = re.compile(r"\b(?:voltserve_\w+|vllm:\w+|up|ALERTS)\b")


def expressions() -> list[str]:
    """Every query of the dashboard and of the rules."""
    panels = [target["expr"] for panel in PANELS for target in panel["targets"]]
    annotations = [one["expr"] for one in DASHBOARD["annotations"]["list"]]
    return [*panels, *annotations, *(rule["expr"] for rule in RULES)]


def metrics(expression: str) -> set[str]:
    """The names of the series that a query reads."""
    return set(_METRIC.findall(re.sub(r'"[^"]*"', '""', expression)))
