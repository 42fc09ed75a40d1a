"""A finding of doctor."""

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "info", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. error: serving will fail or go wrong; warning: slower or at risk; info: worth knowing.

    `what` names it, such as "GPU 0"; `remedy` is empty where there is nothing to do.
    """

    level: Level
    check: str
    what: str
    expected: str
    got: str
    remedy: str = ""

    def __str__(self) -> str:
        if self.level == "ok":
            return f"{self.what}: {self.got}"
        text = f"{self.what}: expected {self.expected}, got {self.got}"
        return f"{text}. {self.remedy}" if self.remedy else text

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)
