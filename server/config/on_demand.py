"""Engines on demand: when one that runs may leave its GPUs to another, and which share theirs."""

from pydantic import BaseModel, ConfigDict

CPU = "the CPU"
RESIDENCE = (30.0, 300.0)  # seconds, the least and the most
IDLE_SHARE = 6  # an engine without requests for a sixth of its residence counts as out of use


class OnDemand(BaseModel):
    """How an engine on demand shares its places; docs/engines.md explains the file's keys. Times are in seconds.

    `places` are its GPUs, or the CPU. Two engines with a common place run one at a time. An `idle_timeout` of 0 never
    stops it. A `min_residence` of None is the duration of the engine's last start, within RESIDENCE.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: frozenset[str] = frozenset()
    idle_timeout: float = 0.0
    min_residence: float | None = None
    drain_timeout: float = 300.0

    def residence(self, start_seconds: float) -> float:
        """Seconds that an engine stays in use. By default half of the time is for answers, half for starts."""
        if self.min_residence is not None:
            return self.min_residence
        least, most = RESIDENCE
        return min(most, max(least, start_seconds))

    def collides(self, other: "OnDemand") -> bool:
        """Whether both cannot run at once."""
        return not self.places.isdisjoint(other.places)
