"""A step of the smoke test, and its result."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quant.errors import QuantError
from server.errors import UserError

Verdict = Literal["ok", "warning", "error", "skipped"]
_ORDER: tuple[Verdict, ...] = ("skipped", "ok", "warning", "error")


@dataclass(frozen=True)
class Result:
    """What a step found: its verdict, a line, and more lines (findings; prompts with their answers)."""

    verdict: Verdict
    summary: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A step that was gone through, or skipped. `model` is empty where it is about the machine; `seconds` it took."""

    name: str
    model: str
    seconds: float
    result: Result

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"step": self.name, "model": self.model, "seconds": round(self.seconds, 1), **asdict(self.result)}


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of some verdicts; ok of none."""
    return max(verdicts, key=_ORDER.index, default="ok")


def take(name: str, model: str, work: Callable[[], Result]) -> Step:
    """Runs a step. What a user can act on becomes its error; anything else is a bug of ours and raised."""
    began = time.monotonic()
    try:
        result = work()
    except (UserError, QuantError) as error:
        result = Result("error", str(error))
    return Step(name, model, time.monotonic() - began, result)
