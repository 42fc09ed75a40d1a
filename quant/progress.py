"""How long-running work reports: absolute figures, so that a report may be dropped."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units (`unit` is for example "bytes") of the step `what`, a phrase such as "quantizing".

    `note`: something else worth showing at the moment, such as a rate.
    """

    what: str
    done: int
    total: int
    unit: str
    note: str = ""


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """The `OnProgress` of a caller that shows no progress."""
