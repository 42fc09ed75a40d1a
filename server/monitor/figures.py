"""Computes the figures from two readings: pure functions."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from server.monitor.reading import GpuReading, Reading

KEPT = 60  # readings that the curve of tokens per second shows

GENERATED = "vllm:generation_tokens_total"
PROMPT = "vllm:prompt_tokens_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
QUEUED = "voltserve_requests_queued"
CACHE = "vllm:kv_cache_usage_perc"
TTFT = "vllm:time_to_first_token_seconds"
PREEMPTED = "vllm:num_preemptions_total"
REFUSED = "voltserve_requests_refused_total"
RESTARTS = "voltserve_engine_restarts_total"


@dataclass(frozen=True)
class Figures:
    """The figures that are shown. Rates are per second since the last reading, None at the first; `first_token` is the
    mean in seconds.

    `running` requests are in the engine's batch, `waiting` in the engine, `queued` in the gateway. `cache`: the used
    part of the key/value cache, from 0 to 1; of several engines the fullest. `engines`: of several, each one's state in
    words.
    """

    state: str
    reason: str
    model: str
    preset: str
    progress: Mapping[str, Any] | None
    warnings: tuple[str, ...]
    generated: float | None
    prompt: float | None
    first_token: float | None
    running: int
    waiting: int
    queued: int
    cache: float
    preempted: int
    refused: int
    restarts: int
    problem: str
    gpus: tuple[GpuReading, ...]
    gpus_problem: str
    engines: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


def figures(before: Reading | None, now: Reading) -> Figures:
    """What a reading says, and what has happened since the one before."""
    health, metrics = now.health, now.metrics
    gpus, lost_gpus = now.gpus, ""
    if not gpus and health.get("gpus"):  # a service on another machine reports its own
        gpus = tuple(_gpu_of(gpu) for gpu in health["gpus"] if not gpu.get("problem"))
        lost = [f"GPU {gpu['index']}: {gpu['problem']}" for gpu in health["gpus"] if gpu.get("problem")]
        lost_gpus = "; ".join(lost)
    return Figures(
        state=str(health.get("state", "no answer")),
        reason=str(health.get("reason", "")),
        model=str(health.get("model", "")),
        preset=str(health.get("preset", "")),
        progress=health.get("progress"),
        warnings=tuple(health.get("warnings", ())),
        generated=_rate(before, now, GENERATED),
        prompt=_rate(before, now, PROMPT),
        first_token=_mean(before, now, TTFT),
        running=int(metrics.sum(RUNNING)),
        waiting=int(metrics.sum(WAITING)),
        queued=int(metrics.sum(QUEUED)),
        cache=metrics.largest(CACHE),
        preempted=int(metrics.sum(PREEMPTED)),
        refused=int(metrics.sum(REFUSED)),
        restarts=int(metrics.sum(RESTARTS)),
        problem=now.problem,
        gpus=gpus,
        gpus_problem=lost_gpus or ("" if gpus else now.gpus_problem),
        engines=tuple(_engine(one) for one in health.get("engines", ())),
    )


def _engine(one: Mapping[str, Any]) -> str:
    """One of several engines: its name and state; of one on demand, who waits for it and why."""
    demand = one.get("on_demand") or {}
    words = f"{one.get('name')}: {one.get('state')}"
    if demand.get("waiting"):
        return f"{words}, {demand['waiting']} waiting: {demand.get('waits_for')}"
    return f"{words} ({one.get('reason')})" if demand and one.get("state") != "ready" else words


def _gpu_of(gpu: Mapping[str, Any]) -> GpuReading:
    names = ("index", "name", "memory_used", "memory_total", "temperature")
    return GpuReading(**{name: gpu[name] for name in names}, throttle=tuple(gpu.get("throttle", ())))


def _rise(before: Reading | None, now: Reading, name: str) -> float | None:
    """How much a counter grew; None where one reading lacks it, or where the engine was restarted in between."""
    if before is None or name not in before.metrics or name not in now.metrics:
        return None
    rise = now.metrics.sum(name) - before.metrics.sum(name)
    return rise if rise >= 0 else None


def _rate(before: Reading | None, now: Reading, name: str) -> float | None:
    rise = _rise(before, now, name)
    return None if rise is None or before is None or now.at <= before.at else rise / (now.at - before.at)


def _mean(before: Reading | None, now: Reading, histogram: str) -> float | None:
    total, count = _rise(before, now, f"{histogram}_sum"), _rise(before, now, f"{histogram}_count")
    return total / count if total is not None and count else None


@dataclass
class History:
    """The last rates of generated tokens, oldest first."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, rate: float | None) -> None:
        """Adds a rate; a reading without one leaves no gap."""
        if rate is not None:
            self.rates.append(rate)

    def curve(self) -> str:
        """The rates as blocks of eight heights, from 0 to the largest."""
        largest = max(self.rates, default=0.0)
        return "".join(" ▁▂▃▄▅▆▇█"[round(8 * rate / largest) if largest else 0] for rate in self.rates)
