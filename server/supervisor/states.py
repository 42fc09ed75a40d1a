"""The engine's states, the transitions among them as data, and the snapshot that everyone else reads."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from server.decisions import Decision
from server.diagnosis import Diagnosis


class State(str, Enum):
    """What the engine is doing; docs/architecture.md says what each means."""

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    FAILED = "failed"
    DRAINING = "draining"


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.STOPPED: frozenset({State.STARTING, State.DRAINING}),
        State.STARTING: frozenset({State.LOADING, State.FAILED, State.DRAINING}),
        State.LOADING: frozenset({State.WARMING, State.FAILED, State.DRAINING}),
        State.WARMING: frozenset({State.READY, State.FAILED, State.DRAINING}),
        State.READY: frozenset({State.DEGRADED, State.FAILED, State.DRAINING}),
        State.DEGRADED: frozenset({State.READY, State.FAILED, State.DRAINING}),
        State.FAILED: frozenset({State.STARTING, State.DRAINING}),
        State.DRAINING: frozenset({State.STOPPED}),
    }
)


class IllegalTransitionError(Exception):
    """A transition that the table does not have: a bug in the supervisor."""


def check_transition(old: State, new: State) -> None:
    """Raises IllegalTransitionError where the table has no way from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransitionError(f"{old.value} -> {new.value}")


@dataclass(frozen=True)
class Progress:
    """How far a start is: `done` of `total` `unit`s (bytes) in `phase`, or only the phase."""

    phase: str
    done: int | None = None
    total: int | None = None
    unit: str | None = None

    @property
    def fraction(self) -> float | None:
        """Between 0 and 1, where the total is known."""
        if self.done is None or not self.total:
            return None
        return min(1.0, self.done / self.total)

    def __str__(self) -> str:
        return self.phase if self.fraction is None else f"{self.phase} {self.fraction:.0%}"


@dataclass(frozen=True)
class Status:
    """A snapshot. Times are `time.monotonic()` seconds; `retry_at` is set while a restart is scheduled.

    `diagnosis` says why the engine last failed, where the catalogue knows; it goes once the engine is ready again.
    `warnings` are what is odd about an engine that works: of its first completion, and of the choices it made.
    `given_up`: there will be no restart.
    """

    state: State
    reason: str
    since: float
    started_at: float
    progress: Progress | None = None
    restarts: int = 0
    last_exit: str | None = None
    decisions: tuple[Decision, ...] = ()
    retry_at: float | None = None
    diagnosis: Diagnosis | None = None
    warnings: tuple[str, ...] = ()
    given_up: bool = False

    @property
    def lasting(self) -> bool:
        """Whether the engine was given up for a reason that lasts: the settings, or the model's files."""
        return self.given_up and self.diagnosis is not None and not self.diagnosis.retry

    @property
    def start_elapsed(self) -> float:
        """Seconds since the engine was last started."""
        return time.monotonic() - self.started_at

    def explain(self) -> str:
        """The state in a sentence, for people who cannot use the engine now."""
        detail = f" ({self.progress})" if self.progress and self.state in {State.STARTING, State.LOADING} else ""
        return f"the engine is {self.state.value}{detail}: {self.reason}"
