"""What each key has used: today's tokens for budgets, sums since the start for metrics, and days for the usage file."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from math import ceil

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from server.errors import ConfigError
from server.usage import KEPT_DAYS, Counts, UsageFile

WRITE_AFTER = 2.0  # seconds from a request's end until it is in the file; a crash loses no more

log = structlog.get_logger("voltserve.usage")


def _now() -> datetime:
    return datetime.now(timezone.utc)


class Ledger:
    """Sums in memory, written to `file` every few seconds. A file that cannot be written is an error in the log."""

    def __init__(self, file: UsageFile, now: Callable[[], datetime] = _now) -> None:
        self.since_start: dict[tuple[str, str], Counts] = {}
        self._file = file
        self._now = now
        self._waiting: dict[tuple[date, str, str], Counts] = {}
        self._writing: dict[tuple[date, str, str], Counts] = {}
        self._day = now().date()
        self._written: dict[str, int] = {}  # tokens of `_day` by key, as the file has them
        self._timer: asyncio.Task[None] | None = None
        self._failed = False
        self._one_writer = asyncio.Lock()
        self._done(self._day, self._add(self._day))

    def today(self, key: str) -> int:
        """Tokens of this key since 00:00 UTC."""
        day = self._now().date()
        written = self._written.get(key, 0) if day == self._day else 0
        unwritten = (*self._waiting.items(), *self._writing.items())
        return written + sum(one.tokens for (of, name, _), one in unwritten if (of, name) == (day, key))

    def seconds_to_midnight(self) -> int:
        """Seconds until 00:00 UTC, when budgets start again."""
        now = self._now()
        midnight = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), timezone.utc)
        return max(1, ceil((midnight - now).total_seconds()))

    def book(self, key: str, model: str, counts: Counts) -> None:
        """Adds a request that has ended."""
        at = (self._now().date(), key, model)
        self._waiting[at] = self._waiting.get(at, Counts()) + counts
        self.since_start[key, model] = self.since_start.get((key, model), Counts()) + counts
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._write_soon())

    async def close(self) -> None:
        """Writes the counts in memory. Call it when no request is left."""
        async with self._one_writer:
            if self._timer is not None:
                self._timer.cancel()  # it sleeps, or waits for its turn to write
            await self._write_beside()

    async def _write_soon(self) -> None:
        while self._waiting:
            await asyncio.sleep(WRITE_AFTER)
            async with self._one_writer:
                await self._write_beside()

    async def _write_beside(self) -> None:
        """Beside the event loop: a slow disk must not hold up every stream."""
        self._writing, self._waiting = self._waiting, {}
        day = self._now().date()
        self._done(day, await asyncio.get_running_loop().run_in_executor(None, self._add, day))

    def _add(self, day: date) -> dict[str, int] | None:
        try:
            return self._file.add(self._writing, day)
        except ConfigError as error:
            if not self._failed:
                log.error(  # noqa: TRY400 — the message says it all
                    "tokens of keys are kept in memory only; budgets begin anew with each start", problem=str(error)
                )
            return None

    def _done(self, day: date, written: dict[str, int] | None) -> None:
        if written is None:
            oldest = day - timedelta(days=KEPT_DAYS)
            self._waiting = {at: one for at, one in _sum(self._waiting, self._writing).items() if at[0] >= oldest}
        else:
            self._day, self._written = day, written
        self._failed = written is None
        self._writing = {}


def _sum(
    one: dict[tuple[date, str, str], Counts], other: dict[tuple[date, str, str], Counts]
) -> dict[tuple[date, str, str], Counts]:
    return {at: one.get(at, Counts()) + other.get(at, Counts()) for at in one.keys() | other.keys()}


class UsageFigures(Collector):
    """The sums since the start, for Prometheus. Series are bounded: by the keys there are, and the models served.

    Args:
        ledger: has the sums.
        names: the keys there are now; those revoked drop out.
    """

    def __init__(self, ledger: Ledger, names: Callable[[], frozenset[str]]) -> None:
        self._ledger = ledger
        self._names = names

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Prometheus counters."""
        labels = ["key", "model"]
        tokens = CounterMetricFamily("voltserve_key_tokens", "Tokens of a key's requests", labels=[*labels, "kind"])
        requests = CounterMetricFamily("voltserve_key_requests", "A key's requests that the engine took", labels=labels)
        uncounted = CounterMetricFamily(
            "voltserve_key_uncounted_requests",
            "A key's requests that ended before the engine said how many tokens they were",
            labels=labels,
        )
        names = self._names()
        for (key, model), counts in self._ledger.since_start.items():
            if key in names:
                tokens.add_metric([key, model, "prompt"], counts.prompt)
                tokens.add_metric([key, model, "completion"], counts.completion)
                requests.add_metric([key, model], counts.requests)
                uncounted.add_metric([key, model], counts.uncounted)
        yield from (tokens, requests, uncounted)
