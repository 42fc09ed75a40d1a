"""What was chosen automatically, and why: printed at start, kept in `/health`, shown by `voltserve explain`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One automatic choice: `what` was decided, the `choice`, and the `reason` in a sentence."""

    what: str
    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.choice} ({self.reason})"
