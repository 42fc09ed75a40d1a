"""How requests arrive: closed loop (a number of users, each waits for its answer) or open loop (a Poisson process).

A closed loop slows down with the server, so it never shows a growing queue. An open loop does. Both are standard;
B. Schroeder, A. Wierman, M. Harchol-Balter, "Open Versus Closed: A Cautionary Tale", NSDI 2006.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

from server.errors import ConfigError


@dataclass(frozen=True)
class Closed:
    """`streams` users; each sends its next request once the last is answered."""

    streams: int

    @property
    def label(self) -> str:
        """For tables and plots."""
        return f"×{self.streams}"

    @property
    def default_requests(self) -> int:
        """Four per user, so that the start and the end, when not all users are busy, count little."""
        return max(8, 4 * self.streams)


@dataclass(frozen=True)
class Open:
    """Requests arrive at random, `rate` per second on average, whether earlier ones are answered or not."""

    rate: float

    @property
    def label(self) -> str:
        """For tables and plots."""
        return f"{self.rate:g}/s"

    @property
    def default_requests(self) -> int:
        """Enough for a 99th percentile that is not the maximum of a handful, and for at least half a minute."""
        return max(32, round(30 * self.rate))


Level = Closed | Open


def arrivals(level: Open, requests: int, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive, the first at 0; gaps are exponential with mean 1/rate."""
    gaps = random.Random(f"arrivals {seed} {level.rate}")  # noqa: S311 — load, not secrets
    return list(accumulate((gaps.expovariate(level.rate) for _ in range(requests - 1)), initial=0.0))


def parse_levels(concurrency: str, rate: str) -> tuple[Level, ...]:
    """Levels from `--concurrency 1,8` and `--rate 0.5,2`, closed ones first.

    Raises:
        ConfigError: something is no positive number, or nothing is given.
    """
    closed = [Closed(int(number)) for number in _numbers("--concurrency", concurrency, whole=True)]
    opened = [Open(number) for number in _numbers("--rate", rate, whole=False)]
    if not closed and not opened:
        raise ConfigError("no load given: expected --concurrency 1,8 or --rate 0.5, got neither")
    return tuple(dict.fromkeys([*closed, *opened]))


def _numbers(flag: str, text: str, *, whole: bool) -> list[float]:
    numbers = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            number: float = int(part) if whole else float(part)
        except ValueError:
            number = 0
        if not 0 < number < 1e6:
            kind = "whole numbers" if whole else "numbers"
            raise ConfigError(f"{flag}: expected {kind} above 0 with commas between, got {part!r}")
        numbers.append(number)
    return numbers
