import json
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.errors import ConfigError
from server.keys import add_key, revoke_key
from server.usage import KEPT_DAYS, Counts, Row, UsageFile, usage_path

DAY = date(2026, 12, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.usage.db"


def test_the_file_lies_beside_the_keys_unless_said_otherwise() -> None:
    assert usage_path("/keys/keys.json", "") == Path("/keys/keys.usage.db")
    assert usage_path("/keys/keys.json", "/var/u.db") == Path("/var/u.db")


def test_additions_add_up_by_day_key_and_model(path: Path) -> None:
    file = UsageFile(path)
    assert file.add({(DAY, "ann", "m"): Counts(1, 0, 10, 5)}, DAY) == {"ann": 15}
    more = {(DAY, "ann", "m"): Counts(2, 1, 1, 1), (DAY, "ann", "n"): Counts(1, 0, 2, 2)}
    assert file.add({**more, (DAY - timedelta(1), "bob", "m"): Counts(1, 0, 9, 9)}, DAY) == {"ann": 21}
    assert file.since(DAY) == [Row(DAY, "ann", "m", Counts(3, 1, 11, 6)), Row(DAY, "ann", "n", Counts(1, 0, 2, 2))]
    assert [row.key for row in file.since(DAY - timedelta(1))] == ["bob", "ann", "ann"]


def test_old_days_are_dropped(path: Path) -> None:
    file = UsageFile(path)
    file.add({(DAY, "ann", "m"): Counts(1, 0, 1, 1)}, DAY)
    file.add({}, DAY + timedelta(KEPT_DAYS + 1))
    assert file.since(date.min) == []


def test_it_is_the_owner_s_alone_and_none_is_made_by_looking(path: Path) -> None:
    assert UsageFile(path).since(DAY) == []
    assert not path.exists()
    UsageFile(path).add({}, DAY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_several_gateways_lose_nothing(path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: UsageFile(path).add({(DAY, "ann", "m"): Counts(1, 0, 1, 1)}, DAY), range(40)))
    assert UsageFile(path).since(DAY)[0].counts == Counts(40, 0, 40, 40)


@pytest.mark.parametrize("harm", ["no folder", "no database"])
def test_a_file_that_cannot_be_used_says_what_to_do(tmp_path: Path, path: Path, harm: str) -> None:
    if harm == "no folder":
        path = tmp_path / "none" / "x.db"
    else:
        path.write_text("no database" * 1000)
    with pytest.raises(ConfigError, match=f"{path.name} cannot be written: .*--usage-file"):
        UsageFile(path).add({}, DAY)


def test_the_command_shows_today_the_budget_and_the_days_before(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    for name in ("ann", "gone"):
        add_key(keys, name, tokens_per_day=1000)
    add_key(keys, "idle")
    revoke_key(keys, "gone")
    today = datetime.now(timezone.utc).date()
    used = {(today, "ann", "m"): Counts(2, 1, 100, 20), (today - timedelta(3), "ann", "n"): Counts(1, 0, 7, 3)}
    UsageFile(usage_path(str(keys), "")).add({**used, (today, "gone", "m"): Counts(1, 0, 4, 4)}, today)

    def shown(*flags: str) -> str:
        result = CliRunner().invoke(app, ["keys", "usage", "--file", str(keys), *flags])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert shown().splitlines() == [
        "ann  today: 120 of 1000 tokens; 30 days: 107 in, 23 out, 3 requests, 1 of them not counted whole",
        "gone (revoked)  today: 8 tokens; 30 days: 4 in, 4 out, 1 requests",
        "idle  today: 0 tokens; 30 days: 0 in, 0 out, 0 requests",
    ]
    assert "1 days: 100 in" in shown("--days", "1")
    assert [row["model"] for row in json.loads(shown("--json")) if row["key"] == "ann"] == ["n", "m"]


def test_a_broken_file_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    add_key(keys, "ann")
    sqlite3.connect(tmp_path / "keys.usage.db").close()
    (tmp_path / "keys.usage.db").write_bytes(b"x" * 5000)
    result = CliRunner().invoke(app, ["keys", "usage", "--file", str(keys)])
    assert result.exit_code != 0
    assert "not a database" in result.output
