"""MLflow's stores: a folder `mlruns` with a file for each metric, and the SQLite database. Neither needs mlflow.

A metric file has lines `milliseconds value step`. The database writes NaN as 0 with a flag and infinity as 1.797e308.
"""

from __future__ import annotations

import math
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from bessemer.errors import UserError
from bessemer.observe.foreign.builder import RunBuilder
from bessemer.observe.foreign.series import ForeignRun
from bessemer.run.journal import to_number

SQLITE_MAGIC = b"SQLite format 3\0"
TABLES = {"metrics", "params", "runs"}


def is_run_of_store(folder: Path) -> bool:
    """Whether a folder is a run in a file store."""
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


def read_run_of_store(folder: Path) -> list[ForeignRun]:
    """The run in a folder of a file store. Points are in the order in which they were logged."""
    name_file = folder / "tags" / "mlflow.runName"
    builder = RunBuilder(
        "mlflow", name_file.read_text("utf-8", "replace").strip() if name_file.is_file() else folder.name
    )
    try:
        meta = yaml.safe_load((folder / "meta.yaml").read_bytes())
    except yaml.YAMLError as error:
        raise UserError(f"{folder / 'meta.yaml'}: cannot be read: {str(error).splitlines()[0]}") from error
    if isinstance(meta, dict) and meta.get("run_name"):
        builder.name = str(meta["run_name"])
    for path in sorted((folder / "metrics").rglob("*")):
        if path.is_file():
            key = path.relative_to(folder / "metrics").as_posix()
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    parts = line.split()
                    value = to_number(parts[1].decode("ascii", "replace")) if len(parts) >= 2 else None
                    if value is not None:
                        builder.add(key, int(parts[2]) if len(parts) > 2 else 0, value, number)
    for path in sorted((folder / "params").rglob("*")):
        if path.is_file():
            text = path.read_text("utf-8", "replace").strip()
            builder.settings[path.relative_to(folder / "params").as_posix()] = _scalar(text)
    return [builder.finish([folder])] if builder else []


def _scalar(text: str) -> Any:
    value = to_number(text)
    return text if value is None else int(value) if text.lstrip("-").isdecimal() else value


def is_store(path: Path) -> bool:
    """Whether a file is a SQLite database with MLflow's tables."""
    with path.open("rb") as file:
        if file.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
            return False
    try:
        with _opened(path) as store:
            rows = store.execute("select name from sqlite_master where type = 'table'").fetchall()
    except sqlite3.Error:
        return False
    return {name for (name,) in rows} >= TABLES


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)


def read_store(path: Path) -> list[ForeignRun]:
    """All runs of a database that have metrics."""
    try:
        store = _opened(path)
        try:
            return list(_runs_of_store(store, path))
        finally:
            store.close()
    except sqlite3.Error as error:
        raise UserError(f"{path}: the database cannot be read: {error}") from error


def _runs_of_store(store: sqlite3.Connection, path: Path) -> Iterator[ForeignRun]:
    for run, name in store.execute("select run_uuid, name from runs order by start_time").fetchall():
        builder = RunBuilder("mlflow", name or run)
        points = store.execute(
            "select key, value, step, is_nan from metrics where run_uuid = ? order by timestamp, step", (run,)
        )
        for key, value, step, is_nan in points:
            builder.add(key, int(step), math.nan if is_nan else _unbounded(value))
        for key, value in store.execute("select key, value from params where run_uuid = ?", (run,)):
            builder.settings[key] = _scalar(str(value))
        if builder:
            yield builder.finish([path])


def _unbounded(value: float) -> float:
    """Infinity, which the database writes as the largest number."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max * 0.9999 else float(value)
