"""Rows in JSON lines: what the alignment commands read and write, and work that continues where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.align.responder import chunks
from bessemer.errors import UserError
from bessemer.observe.progress import ProgressReport, silent
from bessemer.spec.load import read_text
from bessemer.storage import write_atomic

Row = dict[str, Any]
CHUNK = 64  # cases that are answered together, and lost when the command is killed


def read_rows(path: Path) -> Iterator[tuple[str, Row, str]]:
    """The place (file:row), the object and the line of each row of a .jsonl file."""
    empty = True
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: is not JSON ({error}); correct or delete the row") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: is a {type(row).__name__}, not an object; correct or delete the row")
        empty = False
        yield f"{path}:{number}", row, line
    if empty:
        raise UserError(f"{path}: has no rows")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes the file at once; the number of its rows."""
    lines = [_dump(row) for row in rows]
    write_atomic(path, "".join(f"{line}\n" for line in lines), parents=True)
    return len(lines)


def resumable(
    path: Path | None, settings: Mapping[str, Any], count: int, work: Callable[[Sequence[int]], list[Row]],
    report: ProgressReport = silent, what: str = "answering",
) -> list[Row]:  # fmt: skip
    """The rows of cases 0 to `count`, which `work` makes for several numbers at a time.

    They are also appended to PATH.partial, so that the same command continues after it was stopped; `settings` are what
    the rows depend on. The caller writes its output and then calls `forget_partial`.
    """
    header = json.dumps(settings, sort_keys=True, default=str)
    partial = partial_path(path) if path else None
    rows = _finished(partial, header, count) if partial else []
    if partial:
        write_atomic(partial, "".join(f"{line}\n" for line in (header, *map(_dump, rows))), parents=True)
    report(what, len(rows), count)
    for numbers in chunks(count - len(rows), CHUNK):
        first = len(rows)
        made = work(range(first, first + len(numbers)))
        assert len(made) == len(numbers), "one row for each case"
        if partial:
            with partial.open("a", encoding="utf-8") as file:
                file.write("".join(f"{_dump(row)}\n" for row in made))
        rows += made
        report(what, len(rows), count)
    return rows


def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def forget_partial(path: Path | None) -> None:
    if path:
        partial_path(path).unlink(missing_ok=True)


def _finished(partial: Path, header: str, count: int) -> list[Row]:
    """The rows of a stopped command, in complete groups: a group's seeds follow from its first case."""
    if not partial.exists():
        return []
    text = partial.read_text(encoding="utf-8")
    first, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
    if first != header:
        raise UserError(
            f"{partial}: was begun with another model, file or options: repeat that command, or delete this file"
        )
    complete = len(lines) if len(lines) == count else len(lines) // CHUNK * CHUNK
    return [json.loads(line) for line in lines[:complete]]


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)
