"""Measures the points of a sweep that are not measured yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import QuantError
from quant.progress import OnProgress, Progress
from server.bench.measures import Summary, summarize
from server.bench.prompts import BenchError, find_target
from server.bench.run import BenchSettings, run_bench
from server.config.settings import Config, load_config
from server.plan import NotPlannedError, plan_for
from server.run.child import Service, ServiceFailedError, running
from server.sweep.grid import Point
from server.sweep.store import Record, Store

LOGS = "logs"


@dataclass(frozen=True)
class Sweep:
    """A sweep's settings: the `arguments` of serve that all points share, the load, and the folder for results.

    `module` is the Python module that is `serve`.
    """

    arguments: tuple[str, ...]
    settings: BenchSettings
    out: Path
    module: str = "server"

    def run(self, points: Sequence[Point], store: Store, on_progress: OnProgress) -> None:
        """Measures every point that the store lacks. A failed point does not stop the sweep."""
        logs = self.out / LOGS
        logs.mkdir(exist_ok=True)
        for number, point in enumerate(points):
            on_progress(Progress("points", number, len(points), "points", str(point)))
            if store.find(point) is None:
                store.add(self._try(point, logs / f"{number:03d}.log", on_progress))
        on_progress(Progress("points", len(points), len(points), "points"))

    def _try(self, point: Point, log: Path, on_progress: OnProgress) -> Record:
        values = dict(point.values)
        if reason := self._misfit(point):
            return Record(values, "skipped", reason)
        try:
            with running([*self.arguments, *point.arguments], log, point.variables, self.module) as service:
                ready = service.wait_until_ready(f"start of {log.stem}", on_progress)
                levels = self._measure(service, on_progress)
                failure = _failure(service, levels)
        except ServiceFailedError as error:
            return Record(values, "failed", error.reason, error.diagnosis)
        except BenchError as error:
            return Record(values, "failed", str(error))
        if failure:
            return Record(values, "failed", failure[0], failure[1], ready)
        return Record(values, "measured", "", None, round(ready, 1), tuple(level.as_dict() for level in levels))

    def _misfit(self, point: Point) -> str:
        """Why the point cannot fit, by the memory plan; empty where it may."""
        config = config_at(self.arguments, point)
        try:
            plan = plan_for(config).plan
        except (NotPlannedError, QuantError):  # serve itself says what is wrong
            return ""
        return "; ".join(plan.problems)

    def _measure(self, service: Service, on_progress: OnProgress) -> list[Summary]:
        target = find_target(service.url, "")
        try:
            return [summarize(result) for result in run_bench(target, self.settings, on_progress)]
        except BenchError:
            service.wait_until_ready()  # raises the engine's own reason, where it has one
            raise


def _failure(service: Service, levels: Sequence[Summary]) -> tuple[str, Mapping[str, Any] | None] | None:
    """Why a measured point does not count: the engine or some requests failed."""
    health = service.health()
    if health["last_exit"]:
        return health["last_exit"], health["diagnosis"]
    failed = [
        f"{one.failed} of {one.requests} requests at {one.level}: {next(iter(one.errors))}"
        for one in levels
        if one.failed
    ]
    return ("; ".join(failed), None) if failed else None


def config_at(arguments: Sequence[str], point: Point) -> Config:
    """The merged configuration of a point, its variables among those that the preset gives."""
    config = load_config([*arguments, *point.arguments])
    return config.model_copy(update={"env": {**config.env, **point.variables}})
