"""Compares a plan with the figures in a started engine's log."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.units import GIB

TOLERANCE = 0.05  # of what the engine reports

# A start after a failure logs every figure again.
_RESTART = re.compile(r"restart scheduled")


@dataclass(frozen=True)
class Figure:
    """A figure that the engine reports once per rank.

    Attributes:
        name: what it is, with its unit.
        pattern: finds it in a line of the log, as text or JSON; group 1 is the number.
        unit: bytes or tokens of one.
        of_ranks: picks the rank that the plan is about: the fullest for weights, the one with least memory left for the
        cache.
        planned: the same from `voltserve plan --json`.
    """

    name: str
    pattern: re.Pattern[str]
    unit: int
    of_ranks: Callable[[list[float]], float]
    planned: Callable[[Mapping[str, Any]], float]


def _decision(what: str) -> re.Pattern[str]:
    """Bytes in the log line of a decision of engine/weights/loader.py, as text or, in another order, as JSON."""
    return re.compile(rf"choice\W+(\d+) bytes.*{what}|{what}.*choice\W+(\d+) bytes")


FIGURES = (
    Figure(
        "weights_bytes",
        _decision("weights in memory"),
        1,
        max,
        lambda plan: sum(item["bytes"] for item in plan["items"][:2]),
    ),
    Figure("load_peak_bytes", _decision("memory while loading"), 1, max, lambda plan: plan["load_peak"]["bytes"]),
    Figure(  # vllm/v1/worker/gpu_worker.py
        "cache_bytes",
        re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
        GIB,
        min,
        lambda plan: plan["cache"]["bytes"],
    ),
    Figure(  # vllm/v1/core/kv_cache_utils.py
        "cache_tokens",
        re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
        1,
        min,
        lambda plan: plan["cache"]["tokens"],
    ),
)


@dataclass(frozen=True)
class Row:
    """A figure as planned and as reported; `off` is planned / reported - 1."""

    name: str
    planned: float
    reported: float

    @property
    def off(self) -> float:
        """Relative to what was reported."""
        return self.planned / self.reported - 1

    @property
    def agrees(self) -> bool:
        """Whether it is within TOLERANCE."""
        return abs(self.off) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        off = round(self.off, 5)
        return {
            "figure": self.name,
            "planned": self.planned,
            "reported": self.reported,
            "off": off,
            "agrees": self.agrees,
        }


def agreement(plan: Mapping[str, Any], log: str) -> list[Row]:
    """The figures that the log of an engine's last start holds, beside the plan's.

    Args:
        plan: `voltserve plan --json` of the flags that the engine was started with.
        log: what `voltserve serve` logged, or vLLM alone.
    """
    last = _RESTART.split(log)[-1]
    rows = []
    for figure in FIGURES:
        found = [next(filter(None, match.groups())) for match in figure.pattern.finditer(last)]
        values = [float(text.replace(",", "")) * figure.unit for text in found]
        if values:
            rows.append(Row(figure.name, figure.planned(plan), figure.of_ranks(values)))
    return rows
