"""Tokens that each key used, by day: a small SQLite file beside the file of keys.

The gateway adds to it every few seconds and `voltserve keys usage` reads it. It is a file so that a restart does not
clear budgets. It is SQLite because several gateways may share one file of keys, and no addition may be lost.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from server.errors import ConfigError

KEPT_DAYS = 400  # so the file is bounded by keys x models x days
LOCK_LIMIT = 5.0  # seconds to wait for another gateway's addition

_TABLE = """CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key TEXT, model TEXT, requests INTEGER, uncounted INTEGER, prompt INTEGER, completion INTEGER,
    PRIMARY KEY (day, key, model)) WITHOUT ROWID"""
_ADD = """INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, key, model) DO UPDATE SET
    requests = requests + excluded.requests, uncounted = uncounted + excluded.uncounted,
    prompt = prompt + excluded.prompt, completion = completion + excluded.completion"""


@dataclass(frozen=True)
class Counts:
    """The usage of requests. `uncounted` requests ended before the engine reported their tokens."""

    requests: int = 0
    uncounted: int = 0
    prompt: int = 0
    completion: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.requests + other.requests,
            self.uncounted + other.uncounted,
            self.prompt + other.prompt,
            self.completion + other.completion,
        )

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt + self.completion


@dataclass(frozen=True)
class Row:
    """What one key used of one model on one day (UTC)."""

    day: date
    key: str
    model: str
    counts: Counts


def usage_path(keys_file: str, usage_file: str) -> Path:
    """The file of usage: as given, or beside the file of keys."""
    return Path(usage_file) if usage_file else Path(keys_file).with_suffix(".usage.db")


class UsageFile:
    """The file at `path`; a missing one is made by the first addition."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, used: Mapping[tuple[date, str, str], Counts], today: date) -> dict[str, int]:
        """Adds counts by day, key and model. Returns all tokens of `today` by key, other gateways' among them.

        Raises:
            ConfigError: the file cannot be written.
        """
        with self._connected("written") as connection, connection:
            connection.execute(_TABLE)
            oldest = (today - timedelta(days=KEPT_DAYS)).isoformat()
            connection.execute("DELETE FROM usage WHERE day < ?", (oldest,))
            connection.executemany(
                _ADD,
                [
                    (day.isoformat(), key, model, one.requests, one.uncounted, one.prompt, one.completion)
                    for (day, key, model), one in used.items()
                ],
            )
            query = "SELECT key, SUM(prompt + completion) FROM usage WHERE day = ? GROUP BY key"
            return dict(connection.execute(query, (today.isoformat(),)))

    def since(self, first: date) -> list[Row]:
        """Everything from the day `first` on, by day, key and model; nothing where there is no file yet.

        Raises:
            ConfigError: the file cannot be read.
        """
        if not self._path.exists():
            return []
        with self._connected("read") as connection:
            query = "SELECT * FROM usage WHERE day >= ? ORDER BY day, key, model"
            return [
                Row(date.fromisoformat(day), key, model, Counts(*counts))
                for day, key, model, *counts in connection.execute(query, (first.isoformat(),))
            ]

    @contextlib.contextmanager
    def _connected(self, what: str) -> Iterator[sqlite3.Connection]:
        try:
            # The file shows people's names and habits, so only its owner may read it, like the file of keys.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            with contextlib.closing(sqlite3.connect(self._path, timeout=LOCK_LIMIT)) as connection:
                yield connection
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            remedy = "name a writable place with --usage-file, or move the file away to begin anew"
            raise ConfigError(f"tokens of keys: {self._path} cannot be {what}: {reason}; {remedy}") from error
