"""What a service has answered, kept in one SQLite file that all workers of a machine share, with the rate limit. Each
answer is committed as it comes, so a job that is killed and started again asks for nothing twice. Texts and keys are
not in it: an answer is found by the hash of what was asked."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bessemer.errors import UserError

_PATIENCE_S = 60.0  # for the lock of another process
_CLOCK_WENT_BACK_S = 3600.0  # no queue is that long
_ASKED_AT_ONCE = 500  # SQLite takes 999 values in one statement everywhere

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (url TEXT PRIMARY KEY, next_s REAL NOT NULL) WITHOUT ROWID;
"""


class Answers:
    """Safe for several threads and processes; not for several machines, so the file belongs on a local disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None
        self._owner = 0

    def get(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """The answers that are known."""
        found: dict[bytes, float] = {}
        with self._connection() as connection:
            for at in range(0, len(keys), _ASKED_AT_ONCE):
                some = keys[at : at + _ASKED_AT_ONCE]
                asked = f"SELECT key, score FROM answers WHERE key IN ({','.join('?' * len(some))})"
                found.update(connection.execute(asked, some))
        return found

    def put(self, answers: Sequence[tuple[bytes, float]]) -> None:
        with self._connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", answers)

    def turn(self, url: str, interval_s: float) -> float:
        """Takes the next turn of this machine's workers at a service; returns how long to wait for it, in seconds."""
        now_s = time.time()
        with self._connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute("SELECT next_s FROM turns WHERE url = ?", (url,)).fetchone()
            start_s = max(now_s, row[0]) if row else now_s
            if start_s - now_s > _CLOCK_WENT_BACK_S:
                start_s = now_s
            connection.execute("INSERT OR REPLACE INTO turns VALUES (?, ?)", (url, start_s + interval_s))
        return start_s - now_s

    def hold(self, url: str, wait_s: float) -> None:
        """No worker's turn comes before that: the service has asked for it."""
        with self._connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            later = "ON CONFLICT (url) DO UPDATE SET next_s = max(next_s, ?2)"
            connection.execute(f"INSERT INTO turns VALUES (?1, ?2) {later}", (url, time.time() + wait_s))

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._opened is None or self._owner != os.getpid():  # a connection must not cross a fork
                    self._opened, self._owner = self._open(), os.getpid()
                yield self._opened
            except (sqlite3.Error, OSError) as error:
                fix = "set service.cache to a file on a local disk, or delete this one"
                what = f"{self.path}: answers of the scoring service cannot be kept ({error})"
                raise UserError(f"{what}; {fix}") from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, _PATIENCE_S, isolation_level=None, check_same_thread=False)
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                # Readers do not block the writer, and a kill loses nothing that was committed.
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.executescript(_TABLES)
                return connection
            except sqlite3.OperationalError as error:
                # Several workers create the file at once: this one statement does not wait for its turn.
                if "locked" not in str(error) or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
