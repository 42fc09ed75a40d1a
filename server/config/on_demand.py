"""Engines on demand: when one that runs may leave its GPUs to another, and which share theirs."""

from pydantic import BaseModel, ConfigDict

CPU = "the CPU"
IDLE_SHARE = 6  # an engine without requests for a sixth of its min_residence counts as out of use


class OnDemand(BaseModel):
    """How an engine on demand shares its place; docs/engines.md says what the file's keys mean. Times in seconds.

    `places` are its GPUs, or the CPU. Of two engines with a common place one runs at a time. An `idle_timeout` of 0 is
    none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: frozenset[str] = frozenset()
    idle_timeout: float = 0.0
    min_residence: float = 30.0
    drain_timeout: float = 300.0

    @property
    def idle_grace(self) -> float:
        """Seconds without a request after which another model need not wait for the end of `min_residence`."""
        return self.min_residence / IDLE_SHARE

    def collides(self, other: "OnDemand") -> bool:
        """Whether both cannot run at once."""
        return not self.places.isdisjoint(other.places)
