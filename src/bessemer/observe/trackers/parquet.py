"""Parquet tables of the steps and evaluations, see csv.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.observe.trackers.csv import Tables
from bessemer.storage import atomic_path


class Parquet(Tables):
    suffix = "parquet"

    def _read(self, path: Path) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path).read()

    def _write(self, table: Any, path: Path) -> None:
        import pyarrow.parquet

        with atomic_path(path, durable=False) as temporary:
            pyarrow.parquet.write_table(table, temporary)


make = Parquet
