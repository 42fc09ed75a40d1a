"""Automatic choices and their reasons: printed at start, kept in `/health`, shown by `voltserve explain`."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One automatic choice: `what` was decided, the `choice`, and the `reason` in a sentence."""

    what: str
    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.choice} ({self.reason})"


# The decision where the engine cannot use the machine's cards (server/config/preset_choice.py).
UNUSED_CARDS = ("engine", "the CPU build")


def costly(decisions: Iterable[Decision]) -> list[str]:
    """Warnings of choices that users hardly want: 4-bit weights kept in 16 bits, unused cards."""
    warnings = []
    for one in decisions:
        if one.what in {"NVFP4 linear layers", "FP8 linear layers", "NVFP4 experts"} and one.choice == "dense":
            warnings.append(f"{one.what} do not stay in 4 bits: {one.reason}")
        elif (one.what, one.choice) == UNUSED_CARDS:
            warnings.append(f"the engine is {one.choice}: {one.reason}")
    return warnings
