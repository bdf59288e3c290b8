"""CSV and Parquet tables of the steps and evaluations, one file each, readable at any time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker
from bessemer.storage import atomic_path

PART_ROWS = 50_000


class Tables(Tracker):
    """`train` and `validation` tables in parts of PART_ROWS rows: only the last part is written again when rows come.
    Rows of steps that were trained again are replaced."""

    suffix = ""

    def open(self, info: RunInfo) -> None:
        self._folder = info.folder(self.suffix)

    @abstractmethod
    def _write(self, table: Any, path: Path) -> None: ...

    @abstractmethod
    def _read(self, path: Path) -> Any: ...

    def _parts(self, prefix: str) -> list[Path]:
        return sorted(self._folder.glob(f"{prefix}-*.{self.suffix}"))

    def rows(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        for prefix in dict.fromkeys(row.prefix for row in rows):
            new = pa.Table.from_pylist(_records([row for row in rows if row.prefix == prefix]))
            self._drop_from(prefix, int(new["step"][0].as_py()))  # they may have been given before
            parts = self._parts(prefix)
            if parts and (last := self._read(parts[-1])).num_rows < PART_ROWS:
                new = pa.concat_tables([last, new], promote_options="permissive")
                self._write(new, parts[-1])
            else:
                self._write(new, self._folder / f"{prefix}-{len(parts):05d}.{self.suffix}")

    def cut(self, step: int) -> None:
        for prefix in ("train", "validation"):
            self._drop_from(prefix, step)

    def _drop_from(self, prefix: str, step: int) -> None:
        import pyarrow.compute as pc

        for path in reversed(self._parts(prefix)):
            table = self._read(path)
            left = table.filter(pc.less(table["step"], step))
            if left.num_rows == table.num_rows:
                return
            if left.num_rows:
                self._write(left, path)
            else:
                path.unlink()


def _records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each step, with all columns that any of them has."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_step[row.step] = {"step": row.step, "time": row.time, **{name: row.values.get(name) for name in names}}
    return list(by_step.values())


class Csv(Tables):
    suffix = "csv"

    def _read(self, path: Path) -> Any:
        import pyarrow.csv

        return pyarrow.csv.read_csv(path)

    def _write(self, table: Any, path: Path) -> None:
        import pyarrow.csv

        with atomic_path(path, durable=False) as temporary:
            pyarrow.csv.write_csv(table, str(temporary))


class Parquet(Tables):
    suffix = "parquet"

    def _read(self, path: Path) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path).read()

    def _write(self, table: Any, path: Path) -> None:
        import pyarrow.parquet

        with atomic_path(path, durable=False) as temporary:
            pyarrow.parquet.write_table(table, temporary)
