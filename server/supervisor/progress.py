"""Receives the engine's progress datagrams. Another process sends them, so each is checked."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from server.decisions import Decision
from server.errors import PreflightError
from server.supervisor.states import Progress

MAX_DATAGRAM = 4096
MAX_DECISIONS = 256
PHASES = ("importing", "configuring", "weights", "warmup")

PhaseName = Literal["importing", "configuring", "weights", "warmup"]
Rank = Annotated[int, Field(ge=0, lt=4096)]
Text = Annotated[str, Field(max_length=1000)]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    rank: Rank


class PhaseEvent(_Event):
    """A process of the engine enters a phase."""

    event: Literal["phase"]
    phase: PhaseName


class ProgressEvent(_Event):
    """A process of the engine has read `done` of `total` bytes."""

    event: Literal["progress"]
    phase: Literal["weights"]
    done: int = Field(ge=0)
    total: int = Field(ge=0)
    unit: Literal["bytes"]

    @model_validator(mode="after")
    def _within_total(self) -> "ProgressEvent":
        if self.done > self.total:
            raise ValueError(f"done {self.done} exceeds total {self.total}")
        return self


class DecisionEvent(_Event):
    """The engine chose something by itself."""

    event: Literal["decision"]
    what: Text
    choice: Text
    reason: Text


class PulseEvent(_Event):
    """The engine's core, which runs the model, has answered between two steps."""

    event: Literal["pulse"]


class FaultEvent(_Event):
    """An exception ended a process of the engine, or, without a `type`, how a process ended in the engine's own words.

    `message` may repeat what a client wrote: it is compared with the catalogue and shown nowhere.
    """

    event: Literal["fault"]
    type: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]{0,99}$|^$")]
    message: Text


Event = PhaseEvent | ProgressEvent | DecisionEvent | PulseEvent | FaultEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def parse_datagram(data: bytes) -> Event:
    """One event. Raises ValueError (pydantic's) where `data` is none."""
    if len(data) > MAX_DATAGRAM:
        raise ValueError(f"datagram of more than {MAX_DATAGRAM} bytes")
    return _EVENT.validate_json(data)


class ProgressTracker:
    """What the events of one start add up to. Ranks load in parallel: the one furthest behind is shown."""

    def __init__(self) -> None:
        self._ranks: dict[int, Progress] = {}
        self._decisions: dict[tuple[str, str], Decision] = {}

    def take(self, event: Event) -> None:
        """Adds one event."""
        if isinstance(event, PhaseEvent):
            self._ranks[event.rank] = Progress(event.phase)
        elif isinstance(event, ProgressEvent):
            self._ranks[event.rank] = Progress(event.phase, event.done, event.total, event.unit)
        elif isinstance(event, DecisionEvent) and len(self._decisions) < MAX_DECISIONS:
            # Every rank reports its choices; the same choice made by all is one decision.
            self._decisions[event.what, event.choice] = Decision(event.what, event.choice, event.reason)

    @property
    def progress(self) -> Progress | None:
        """The slowest rank's progress; None before the first event."""
        return min(self._ranks.values(), key=lambda one: (PHASES.index(one.phase), one.fraction or 0.0), default=None)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The engine's decisions in order of arrival."""
        return tuple(self._decisions.values())


class ProgressReceiver(asyncio.DatagramProtocol):
    """Hands each valid event to `on_event` and each rejected datagram's reason to `on_invalid`."""

    def __init__(self, on_event: Callable[[Event], None], on_invalid: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_invalid = on_invalid

    def datagram_received(self, data: bytes, addr: object) -> None:
        """Called by the event loop."""
        try:
            event = parse_datagram(data)
        except ValidationError as error:
            self._on_invalid(str(error.errors()[0]["msg"]))
        except ValueError as error:
            self._on_invalid(str(error))
        else:
            self._on_event(event)


async def receive_progress(
    path: Path, on_event: Callable[[Event], None], on_invalid: Callable[[str], None]
) -> asyncio.DatagramTransport:
    """Listens on the Unix datagram socket `path` until the transport is closed.

    Raises:
        PreflightError: the socket cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise PreflightError(f"no socket {path}: {error.strerror}; set TMPDIR") from error
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: ProgressReceiver(on_event, on_invalid), sock=sock)
    return transport
