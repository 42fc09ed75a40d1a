"""Runs one level of load after another, each with a warm-up that is not counted."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from quant.progress import OnProgress, Progress, ignore_progress
from server.bench.client import Client, Outcome
from server.bench.load import Closed, Level, Open, arrivals
from server.bench.prompts import BenchError, Target, draw, token_pool
from server.errors import ConfigError

WARMUP_TOKENS = 16  # output tokens of a warm-up request, at most
WARMUP_OPEN = 4  # requests that warm up for an open level


@dataclass(frozen=True)
class BenchSettings:
    """What is asked for. `requests` per level, or each level's own number; `limit`: seconds per request.

    Raises:
        ConfigError: fewer requests than a level has users, so some users would send none.
    """

    input_len: int
    output_len: int
    levels: tuple[Level, ...]
    requests: int | None = None
    seed: int = 0
    limit: float = 600.0

    def __post_init__(self) -> None:
        most = max((level.streams for level in self.levels if isinstance(level, Closed)), default=0)
        if self.requests is not None and self.requests < most:
            raise ConfigError(f"--requests {self.requests}: expected at least {most}, one for each user of ×{most}")


@dataclass(frozen=True)
class Warmup:
    """The requests before a level: how many, how many of them failed, and how long they took in seconds."""

    requests: int
    failed: int
    seconds: float


@dataclass(frozen=True)
class LevelResult:
    """A level's outcomes, by time of sending. `generator_share`: this process' use of one core meanwhile."""

    level: Level
    warmup: Warmup
    seconds: float
    outcomes: tuple[Outcome, ...]
    generator_share: float
    load_average: float


OnLevel = Callable[[LevelResult], None]


def run_bench(
    target: Target, settings: BenchSettings, on_progress: OnProgress = ignore_progress, on_level: OnLevel | None = None
) -> tuple[LevelResult, ...]:
    """Measures every level. `on_level` gets each result at once, so an interrupted run keeps the earlier ones.

    Raises:
        BenchError: the server cannot be measured. Single failed requests are only counted.
    """
    pool = token_pool(target)
    results = []
    for level in settings.levels:
        result = uvloop.run(_Run(target, settings, level, pool, on_progress).run())
        results.append(result)
        if on_level is not None:
            on_level(result)
    return tuple(results)


class _Run:
    """One level."""

    def __init__(
        self, target: Target, settings: BenchSettings, level: Level, pool: tuple[int, ...], on_progress: OnProgress
    ) -> None:
        self._settings = settings
        self._level = level
        self._pool = pool
        self._on_progress = on_progress
        self._requests = settings.requests or level.default_requests
        self._zero = 0.0
        self._client = Client(target, self._now)
        self._outcomes: list[Outcome] = []
        self._tokens = 0
        self._failed = 0

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    async def run(self) -> LevelResult:
        warmup = await self._warm_up()
        load_average = os.getloadavg()[0]
        self._zero = time.perf_counter()
        used = time.process_time()
        await (self._closed(self._level) if isinstance(self._level, Closed) else self._open(self._level))
        seconds = self._now()
        share = (time.process_time() - used) / seconds
        outcomes = tuple(sorted(self._outcomes, key=lambda outcome: outcome.sent))
        return LevelResult(self._level, warmup, seconds, outcomes, share, load_average)

    async def _warm_up(self) -> Warmup:
        """Sends as many short requests at once as the level has users: one-time work happens here."""
        count = self._level.streams if isinstance(self._level, Closed) else WARMUP_OPEN
        length = min(self._settings.output_len, WARMUP_TOKENS)
        self._on_progress(Progress(f"{self._level.label} warm-up", 0, count, "requests"))
        self._zero = time.perf_counter()
        outcomes = await asyncio.gather(*(self._send("warm-up", number, length) for number in range(count)))
        failed = [outcome.error for outcome in outcomes if outcome.error]
        if len(failed) == count:
            raise BenchError(f"every request fails, the first of {count} with: {failed[0]}")
        self._on_progress(Progress(f"{self._level.label} warm-up", count, count, "requests"))
        return Warmup(count, len(failed), self._now())

    async def _send(self, purpose: str, number: int, output_len: int, due: float | None = None) -> Outcome:
        name = (self._settings.seed, purpose, self._level.label, number)
        prompt = draw(self._pool, self._settings.input_len, *name)
        due = self._now() if due is None else due
        return await self._client.complete(prompt, output_len, due, self._settings.limit)

    async def _measure(self, number: int, due: float | None = None) -> None:
        outcome = await self._send("measured", number, self._settings.output_len, due)
        self._outcomes.append(outcome)
        self._tokens += 0 if outcome.error else outcome.output_tokens
        self._failed += bool(outcome.error)
        note = f"{self._tokens / self._now():.1f} tok/s" + (f", {self._failed} failed" if self._failed else "")
        self._on_progress(Progress(self._level.label, len(self._outcomes), self._requests, "requests", note))

    async def _closed(self, level: Closed) -> None:
        numbers = iter(range(self._requests))

        async def user() -> None:
            for number in numbers:  # shared: the next free user takes the next number
                await self._measure(number)

        await asyncio.gather(*(user() for _ in range(level.streams)))

    async def _open(self, level: Open) -> None:
        sending = []
        for number, due in enumerate(arrivals(level, self._requests, self._settings.seed)):
            await asyncio.sleep(max(0.0, due - self._now()))
            sending.append(asyncio.create_task(self._measure(number, due)))
        await asyncio.gather(*sending)
