"""voltserve's own metrics, and the engine's appended to them, as one Prometheus text without duplicate series."""

import re
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from server.supervisor import State, Status

# The classic text format, which every scraper takes. The engine's text is in it too; OpenMetrics names counters
# differently and ends with `# EOF`, so the two could not be joined.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The gateway's metrics, in a registry of their own.

    Args:
        several: whether there are several engines; what each has its own of then carries the label `replica`.
    """

    def __init__(self, *, several: bool = False) -> None:
        of_each = ["replica"] if several else []
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a creation time beside each series, which nobody reads
        self.registry = CollectorRegistry()
        self.state = Gauge(
            "voltserve_state", "1 for the engine's state, 0 for others", [*of_each, "state"], registry=self.registry
        )
        self.load_progress = Gauge(
            "voltserve_load_progress_ratio", "Part of the weights read", of_each, registry=self.registry
        )
        self.restarts = Counter(
            "voltserve_engine_restarts", "Starts of the engine after the first", of_each, registry=self.registry
        )
        self.requests = Counter(
            "voltserve_requests",
            "Answered requests; 499 is a client that went away",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge("voltserve_requests_in_flight", "Requests at the engine", registry=self.registry)
        self.queued = Gauge("voltserve_requests_queued", "Requests that wait for a place", registry=self.registry)
        self.refused = Counter(
            "voltserve_requests_refused",
            "Requests the gateway answered with an error, by the error's code",
            ["code"],
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "voltserve_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its response's body",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "voltserve_request_duration_seconds",
            "From a request's arrival to its end",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.client_disconnects = Counter(
            "voltserve_client_disconnects",
            "Requests whose client went away before the end",
            ["route"],
            registry=self.registry,
        )
        self._several = several

    def observer(self, engine: str = "") -> Callable[[Status], None]:
        """Takes over an engine's status each time it is called."""
        names = (engine,) if self._several else ()
        load_progress = self.load_progress.labels(*names) if names else self.load_progress
        restarts = self.restarts.labels(*names) if names else self.restarts
        seen = 0

        def observe(status: Status) -> None:
            nonlocal seen
            for state in State:
                self.state.labels(*names, state.value).set(state is status.state)
            load_progress.set(_loaded(status))
            restarts.inc(status.restarts - seen)
            seen = status.restarts

        return observe

    def forget(self, engine: str) -> None:
        """Drops the series of an engine that is gone for good."""
        for state in State:
            self.state.remove(engine, state.value)
        self.load_progress.remove(engine)
        self.restarts.remove(engine)

    def render(self, engine_texts: Mapping[str, str]) -> bytes:
        """Our metrics and then the engines', by name; a family of theirs that has a name of ours is left out."""
        own = generate_latest(self.registry)
        families = {name for family in self.registry.collect() for name in _family_names(family.name)}
        kept = {name: without_families(text, families) for name, text in engine_texts.items()}
        return own + (joined(kept) if self._several else "".join(kept.values())).encode("utf-8")


def _loaded(status: Status) -> float:
    """The part of the weights read, from 0 to 1."""
    progress = status.progress
    if status.state in {State.WARMING, State.READY, State.DEGRADED} or (progress and progress.phase == "warmup"):
        return 1.0
    return (progress.fraction if progress else None) or 0.0


def _family_names(name: str) -> tuple[str, ...]:
    """The names a family can have in the text format: a counter gains `_total`."""
    return (name, f"{name}_total")


_FAMILY_LINE = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE_LINE = re.compile(r"([a-zA-Z_:][\w:]*)")


def without_families(text: str, families: set[str]) -> str:
    """A Prometheus text without the families named, and without a second block of any family."""
    kept: list[str] = []
    finished: set[str] = set()
    current = ""
    for line in text.splitlines():
        match = _FAMILY_LINE.match(line)
        if match:
            if match[1] != current:
                finished.add(current)
                current = match[1]
        elif not _SAMPLE_LINE.match(line):
            continue
        if current not in families and current not in finished:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def joined(texts: Mapping[str, str]) -> str:
    """Several engines' texts as one: each family once, with the label `replica` on its samples."""
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        family = ""
        for line in text.splitlines():
            match = _FAMILY_LINE.match(line)
            if match:
                family = match[1]
                heads.setdefault(family, {})[line] = None
            else:
                samples.setdefault(family, []).append(_labelled(line, name))
    return "".join(f"{line}\n" for family in heads for line in (*heads[family], *samples.get(family, ())))


def _labelled(sample: str, replica: str) -> str:
    """`a 1` as `a{replica="x"} 1`, `a{b="c"} 1` as `a{replica="x",b="c"} 1`."""
    name = _SAMPLE_LINE.match(sample)
    if name is None:
        return sample
    rest = sample[name.end() :]
    label = f'replica="{replica}"'
    return f"{name[0]}{{{label},{rest[1:]}" if rest.startswith("{") else f"{name[0]}{{{label}}}{rest}"
