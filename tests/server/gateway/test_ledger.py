import asyncio
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
import structlog

from server.gateway import ledger as module
from server.gateway.ledger import Ledger, UsageFigures
from server.usage import Counts, UsageFile

NOON = datetime(2026, 12, 1, 12, 0, 0, tzinfo=timezone.utc)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


async def test_today_s_tokens_outlive_the_gateway_and_end_at_midnight(path: Path) -> None:
    clock = Clock()
    first = Ledger(UsageFile(path), clock)
    first.book("ann", "m", Counts(1, 0, 10, 5))
    assert (first.today("ann"), first.today("bob")) == (15, 0)
    await first.close()
    second = Ledger(UsageFile(path), clock)
    assert second.today("ann") == 15
    assert second.seconds_to_midnight() == 12 * 3600
    clock.now += timedelta(hours=13)
    assert second.today("ann") == 0


async def test_what_is_booked_is_soon_in_the_file_and_other_gateways_see_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_AFTER", 0.01)
    one, other = Ledger(UsageFile(path), Clock()), Ledger(UsageFile(path), Clock())
    for ledger in (one, other, one):
        ledger.book("ann", "m", Counts(1, 0, 1, 1))
        assert ledger._timer is not None
        await ledger._timer
    assert one.today("ann") == 6
    assert UsageFile(path).since(date.min)[0].counts.requests == 3
    await asyncio.gather(one.close(), other.close())
    assert UsageFile(path).since(date.min)[0].counts.requests == 3


async def test_closing_while_it_writes_books_nothing_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_AFTER", 0.001)
    ledger = Ledger(UsageFile(path), Clock())
    for _ in range(50):
        ledger.book("ann", "m", Counts(1, 0, 1, 1))
        await asyncio.sleep(0.002)
    await ledger.close()
    assert UsageFile(path).since(date.min)[0].counts.requests == 50


async def test_a_file_that_cannot_be_written_is_told_once_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_AFTER", 0.01)
    path = tmp_path / "later" / "usage.db"
    with structlog.testing.capture_logs() as logs:
        ledger = Ledger(UsageFile(path), Clock())
        ledger.book("ann", "m", Counts(1, 0, 1, 1))
        await asyncio.sleep(0.1)
    assert [line["log_level"] for line in logs] == ["error"]
    assert "--usage-file" in logs[0]["problem"]
    assert ledger.today("ann") == 2
    path.parent.mkdir()
    await ledger.close()
    assert UsageFile(path).since(date.min)[0].counts == Counts(1, 0, 1, 1)


async def test_series_are_those_of_keys_that_there_are(path: Path) -> None:
    ledger = Ledger(UsageFile(path), Clock())
    for name in ("ann", "gone"):
        ledger.book(name, "m", Counts(1, 1, 10, 5))
    figures = {family.name: family.samples for family in UsageFigures(ledger, lambda: frozenset({"ann"})).collect()}
    tokens = {(one.labels["key"], one.labels["kind"]): one.value for one in figures["voltserve_key_tokens"]}
    assert tokens == {("ann", "prompt"): 10, ("ann", "completion"): 5}
    assert [one.value for one in figures["voltserve_key_uncounted_requests"]] == [1]
