"""The roll-up holds what the journal holds, after every append, cut and restart."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from bessemer.run.journal import parse_record
from bessemer.watch import rollup
from bessemer.watch.rollup import Rollup, bin_column, bin_edges

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(width=32)
    | st.sampled_from(["nan", "-inf", "word", "7.5"])
)
fields = (
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(["web", "code"]), scalars, max_size=2)
)
records = st.dictionaries(st.sampled_from(["loss", "lr", "veto", "late key", "time"]), fields, max_size=4)
lines = st.builds(lambda record: json.dumps(record).encode() + b"\n", records) | st.sampled_from(
    [b"\n", b"\0\0\n", b"[1]\n", b'{"torn": \n', b"\xff\n", b'{"loss": 1e999}\n', b'{"loss": 1, "loss": "inf"}\n']
)


def naive(content: bytes) -> tuple[int, dict[str, list[Any]]]:
    """The columns of complete lines, value by value."""

    def numbers(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return [pair for name, item in value.items() for pair in numbers(f"{key}.{name}", plain(item))]
        if isinstance(value, list):
            return [pair for i, item in enumerate(value) for pair in numbers(f"{key}.{i}", plain(item))]
        try:
            return [(key, None if value is None else float(value))]
        except ValueError:
            return [(key, None)]

    def plain(item: Any) -> Any:
        """Inside a list or mapping only numbers count."""
        return item if isinstance(item, (int, float, str)) and not isinstance(item, bool) else None

    rows = [record for line in content.split(b"\n")[:-1] if (record := parse_record(line)) is not None]
    columns: dict[str, list[Any]] = {}
    for i, record in enumerate(rows):
        for key, value in record.items():
            for name, number in numbers(key, value):
                columns.setdefault(name, [None] * len(rows))[i] = number
    return len(rows), {name: column for name, column in columns.items() if any(v is not None for v in column)}


def check(cached: Rollup, content: bytes) -> None:
    rows, columns = naive(content)
    assert cached.rows == rows
    assert set(columns) <= set(cached.names)
    for name in cached.names:
        expected = columns.get(name, [None] * rows)
        values = cached.column(name).tolist()
        for value, number in zip(values, expected, strict=True):
            if number is None:
                assert math.isnan(value), name
            elif not math.isfinite(number):
                assert value == math.inf, name
            else:
                assert value == (number if name == "time" else np.float32(number)), name


@given(
    st.lists(st.tuples(st.lists(lines, max_size=6), st.floats(0, 1), st.booleans()), max_size=6), st.binary(max_size=3)
)
def test_columns_are_those_of_the_journal(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[list[bytes], float, bool]], torn: bytes
) -> None:
    """Each change cuts the journal somewhere, appends, and may restart the reader."""
    folder = tmp_path_factory.mktemp("rollup")
    journal, content = folder / "steps.jsonl", b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollup, "CHUNK_BYTES", 64)
        patch.setattr(rollup, "CRC_BYTES", 4096)  # of all that tests write: equal bytes are an equal file
        cached = Rollup(journal, folder / "cache")
        for appended, share, restart in changes:
            kept = content.split(b"\n")[:-1]
            kept = kept[: round(share * len(kept))]
            content = b"".join(line + b"\n" for line in kept) + b"".join(appended)
            journal.write_bytes(content + torn.replace(b"\n", b"x"))
            if restart:
                cached.close()
                cached = Rollup(journal, folder / "cache")
            cached.refresh()
            check(cached, content)
        cached.close()


def write(path: Path, first: int, last: int, mode: str = "a", **more: Any) -> None:
    with path.open(mode) as file:
        for step in range(first, last):
            file.write(json.dumps({"step": step, "loss": 2 + math.sin(step), "text": "x" * 200, **more}) + "\n")


def test_a_cut_raises_the_generation_and_reads_only_what_follows_the_last_good_mark(tmp_path, monkeypatch):
    journal = tmp_path / "steps.jsonl"
    write(journal, 0, 20_000)
    cached = Rollup(journal, tmp_path / "cache")
    assert cached.refresh() and not cached.refresh()
    generation, size = cached.generation, journal.stat().st_size
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:19_000]))
    write(journal, 19_000, 21_000, lr=1.0)  # grown past its old size
    assert journal.stat().st_size > size
    parsed = []
    genuine = cached._parser.columns
    monkeypatch.setattr(cached._parser, "columns", lambda data: parsed.append(len(data)) or genuine(data))
    assert cached.refresh() and cached.generation == generation + 1
    assert sum(parsed) < size / 2
    check(cached, journal.read_bytes())
    cached.close()
    again = Rollup(journal, tmp_path / "cache")  # warm: from the last mark on
    assert again.generation == generation + 1 and again.rows > 17_000
    again.refresh()
    check(again, journal.read_bytes())


def test_a_damaged_cache_is_built_again(tmp_path):
    journal = tmp_path / "steps.jsonl"
    write(journal, 0, 9000)
    for damage in (b"{", b'{"format": 0}', b'{"format": 1, "marks": [[1, 2]], "columns": ["loss"]}'):
        cached = Rollup(journal, tmp_path / "cache")
        cached.refresh()
        check(cached, journal.read_bytes())
        cached.close()
        (tmp_path / "cache" / "rollup.json").write_bytes(damage)


def test_two_readers_do_not_share_a_cache(tmp_path):
    first = Rollup(tmp_path / "steps.jsonl", tmp_path / "cache")
    assert not first.refresh()  # the journal is not there yet
    with pytest.raises(BlockingIOError, match="another process"):
        Rollup(tmp_path / "steps.jsonl", tmp_path / "cache")


@given(st.lists(st.none() | st.floats(width=32), min_size=0, max_size=60), st.integers(1, 12))
def test_bins_keep_extremes_and_count_what_is_not_finite(values: list[float | None], count: int) -> None:
    edges = bin_edges(0, len(values), count)
    bins = bin_column(rollup.encode(values), edges)
    assert len(bins.low) == min(count, len(values)) and int(bins.bad.sum()) == sum(
        v is not None and not math.isfinite(v) for v in values
    )
    for i in range(len(bins.low)):
        part = [v for v in values[edges[i] : edges[i + 1]] if v is not None and math.isfinite(v)]
        if not part:
            assert math.isnan(bins.low[i]) and math.isnan(bins.high[i]) and math.isnan(bins.mean[i])
        else:
            assert (bins.low[i], bins.high[i]) == (min(part), max(part))
            assert bins.mean[i] == pytest.approx(
                math.fsum(part) / len(part), rel=1e-6, abs=1e-30 + 1e-6 * max(map(abs, part))
            )


def test_a_sample_of_a_long_journal_spans_it(tmp_path):
    journal = tmp_path / "steps.jsonl"
    write(journal, 0, 20_000)
    steps = [record["step"] for record in Rollup(journal, tmp_path / "cache").sample(50)]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] > 19_800 and len(steps) == 50
