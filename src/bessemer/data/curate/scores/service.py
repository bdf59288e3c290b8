"""The client of an HTTP scoring service. It respects the rate limit, retries failures, and never sends the same text
twice. Answers are stored in one SQLite file that all workers of a machine share, committed as they come, so a killed
job repeats no request; they are found by the hash of the request, and texts and keys are not stored. The workers also
share the rate limit through this file: each takes the next turn before a request, and a Retry-After delays them all."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import xxhash

from bessemer.endpoint import (
    EXCERPT_CHARS,
    RequestFailed,
    environment_key,
    hide_key,
    pause,
    post_json,
    shorten,
    shown_url,
)
from bessemer.errors import UserError
from bessemer.spec.curate.scores import ServiceSpec
from bessemer.storage import backoff_s

_LOCK_TIMEOUT_S = 60.0  # for another process's lock
_MAX_QUEUE_S = 3600.0  # longer than any queue
_KEYS_PER_QUERY = 500  # older SQLite allows 999 values per statement

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (url TEXT PRIMARY KEY, next_s REAL NOT NULL) WITHOUT ROWID;
"""


class AnswerCache:
    """Safe for several threads and processes, not for several machines: the file belongs on a local disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None
        self._owner = 0

    def get(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """The known answers."""
        answers: dict[bytes, float] = {}
        with self._connection() as connection:
            for at in range(0, len(keys), _KEYS_PER_QUERY):
                batch = keys[at : at + _KEYS_PER_QUERY]
                query = f"SELECT key, score FROM answers WHERE key IN ({','.join('?' * len(batch))})"
                answers.update(connection.execute(query, batch))
        return answers

    def put(self, answers: Sequence[tuple[bytes, float]]) -> None:
        with self._connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", answers)

    def turn(self, url: str, interval_s: float) -> float:
        """Takes this machine's next turn at a service; returns how long to wait for it, in seconds."""
        now_s = time.time()
        with self._connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute("SELECT next_s FROM turns WHERE url = ?", (url,)).fetchone()
            start_s = max(now_s, row[0]) if row else now_s
            if start_s - now_s > _MAX_QUEUE_S:
                start_s = now_s
            connection.execute("INSERT OR REPLACE INTO turns VALUES (?, ?)", (url, start_s + interval_s))
        return start_s - now_s

    def hold(self, url: str, wait_s: float) -> None:
        """Delays all workers' turns, as the service requested."""
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
                problem = f"{self.path}: answers of the scoring service cannot be stored ({error})"
                raise UserError(f"{problem}; {fix}") from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, _LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                # Readers do not block the writer, and a kill loses nothing committed.
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.executescript(_TABLES)
                return connection
            except sqlite3.OperationalError as error:
                # Several workers may create the file at once, and this statement does not wait for locks.
                if "locked" not in str(error) or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)


class Service:
    """One service as a spec describes it. Sends nothing, and needs no key, before the first text."""

    def __init__(self, spec: ServiceSpec, version: str = "") -> None:
        self.spec = spec
        self.shown_url = shown_url(spec.url)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "bessemer" / "service-answers.sqlite"
        cache = cache if spec.cache == "auto" else Path(spec.cache)
        self.answers = AnswerCache(cache.expanduser().absolute())
        definition = [spec.url, spec.request, spec.response, spec.batch > 1, version]
        self._definition = json.dumps(definition, sort_keys=True).encode()

    def scores(self, texts: Sequence[str], places: Sequence[str]) -> list[float]:
        """A score for each text; `places` say where the texts come from, for messages. Known scores come from the
        cache; others are requested, `parallel` at a time. A failure that retries do not cure is a UserError; earlier
        answers are kept."""
        max_bytes = self.spec.max_bytes
        sent = [text if max_bytes is None else text.encode()[:max_bytes].decode(errors="ignore") for text in texts]
        keys = [xxhash.xxh3_128_digest(self._definition + b"\0" + text.encode()) for text in sent]
        scores_by_key = self.answers.get(list(dict.fromkeys(keys)))
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        missing = [(key, first[key]) for key in dict.fromkeys(keys) if key not in scores_by_key]
        batches = [missing[at : at + self.spec.batch] for at in range(0, len(missing), self.spec.batch)]
        if batches:
            scores_by_key |= self._ask_all(batches, sent, places, environment_key(self.spec.key_env, self.shown_url))
        return [scores_by_key[key] for key in keys]

    def _ask_all(
        self, batches: list[list[tuple[bytes, int]]], sent: list[str], places: Sequence[str], key: str
    ) -> dict[bytes, float]:
        answers_by_key: dict[bytes, float] = {}
        stop = threading.Event()

        def ask(batch: list[tuple[bytes, int]]) -> None:
            rows = [i for _, i in batch]
            scores = self._ask([sent[i] for i in rows], places[rows[0]], key, stop)
            answers = list(zip((answer_key for answer_key, _ in batch), scores, strict=True))
            # Stored before the next request: a kill loses only answers in flight.
            self.answers.put(answers)
            answers_by_key.update(answers)

        with ThreadPoolExecutor(min(self.spec.parallel, len(batches))) as pool:
            try:
                for future in as_completed([pool.submit(ask, batch) for batch in batches]):
                    future.result()  # reports the first failure
            finally:
                stop.set()
        return answers_by_key

    def _ask(self, texts: list[str], place: str, key: str, stop: threading.Event) -> list[float]:
        """The scores of one request, after as many attempts as the spec allows."""
        body = json.dumps(_fill_template(self.spec.request, texts)).encode()
        url, headers = self._target(key)
        for attempt in range(self.spec.retries + 1):
            pause(0, stop)  # before taking a turn: unused turns would delay the next job
            pause(self.answers.turn(self.shown_url, 1 / self.spec.requests_per_s), stop)
            try:
                return self._read(post_json(url, body, headers, self.spec.timeout), len(texts), place, key)
            except RequestFailed as failure:
                if not failure.again:
                    raise self._failed(failure.why + self._advice(failure), place, key) from failure
                why, pause_s = failure.why, failure.pause_s
            if attempt == self.spec.retries:
                break
            if pause_s is not None and pause_s > self.spec.longest_wait:
                why += f", asking for a pause of {pause_s:.0f} s"
                break
            if pause_s is not None:
                self.answers.hold(self.shown_url, pause_s)
            else:
                pause_s = backoff_s(attempt, self.spec.backoff, self.spec.longest_wait)
            pause(pause_s, stop)
        attempts = f"{attempt + 1} attempts" if attempt else "one attempt"
        raise self._failed(f"{why} after {attempts}; run again later, or raise service.retries", place, key)

    def _target(self, key: str) -> tuple[str, dict[str, str]]:
        """The URL and headers with the key in its place."""
        if key and self.spec.key_query:
            separator = "&" if urlsplit(self.spec.url).query else "?"
            return f"{self.spec.url}{separator}{quote(self.spec.key_query)}={quote(key, safe='')}", {}
        if not key:
            return self.spec.url, {}
        name, _, value = self.spec.key_header.partition(":")
        return self.spec.url, {name: value.strip().replace("{key}", key)}

    def _advice(self, failure: RequestFailed) -> str:
        if failure.status is None:
            return ""
        if failure.status in (401, 403):
            name = self.spec.key_env
            return f"; check the environment variable {name}" if name else "; check service.key_env"
        if 300 <= failure.status < 400:
            return f"; it leads to {failure.location}: set service.url to that"
        return "; check service.request, or drop such documents with an earlier step"

    def _read(self, data: bytes, count: int, place: str, key: str) -> list[float]:
        try:
            answer = json.loads(data)
            value = _value_at(answer, (self.spec.response or "").split("."))
            scores = value if self.spec.batch > 1 else [value]
            if not isinstance(scores, list) or len(scores) != count:
                raise ValueError(f"expected a list of {count} scores")
            for score in scores:
                if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
                    raise ValueError(f"a score is {shorten(repr(score))}, not a number")
            return [float(score) for score in scores]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            excerpt = shorten(data[: 4 * EXCERPT_CHARS].decode(errors="replace"))
            why = f"no score at {self.spec.response!r} of its answer ({error}): {excerpt}"
            raise self._failed(f"{why}; check service.response", place, key) from error

    def _failed(self, why: str, place: str, key: str) -> UserError:
        return UserError(hide_key(f"{self.shown_url}: {why} (asked about {place})", key))


def _fill_template(template: Any, texts: list[str]) -> Any:
    """The request with the text, or the list of texts, inserted."""
    if isinstance(template, dict):
        return {name: _fill_template(value, texts) for name, value in template.items()}
    if isinstance(template, list):
        return [_fill_template(value, texts) for value in template]
    if template == "{texts}":
        return texts
    return texts[0] if template == "{text}" else template


def _value_at(answer: Any, path: list[str]) -> Any:
    """The value at a path: field names, list indices, * for all items of a list."""
    for k, step in enumerate(path):
        if step == "*":
            if not isinstance(answer, list):
                raise ValueError("there is no list at *")
            return [_value_at(item, path[k + 1 :]) for item in answer]
        if isinstance(answer, list):
            answer = answer[int(step)]
        elif isinstance(answer, dict) and step in answer:
            answer = answer[step]
        else:
            raise ValueError(f"there is no {step!r}")
    return answer
