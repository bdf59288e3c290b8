"""Places: every document's FILE:ROW comes back, however batches and parts are cut."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.curate.dedup.shuffle import Places, note_places, unpack
from bessemer.data.read.entry import Document

rows = st.lists(st.tuples(st.sampled_from(["a.jsonl", "b/ü.jsonl", "c"]), st.integers(1, 5)), min_size=1, max_size=30)


@given(st.lists(rows, min_size=1, max_size=4), st.integers(1, 7))
def test_every_place_comes_back(tmp_path_factory: Any, parts: list[list[tuple[str, int]]], batch: int) -> None:
    noted, expected, first = [], {}, 0
    for part in parts:
        documents, row = [], 0
        for file, step in part:
            row += step  # rows that are left out, and files that change in the middle
            documents.append(Document("", file, row))
        ordinals = np.arange(len(documents), dtype=np.int64) * 2
        gathered: dict[str, list[Any]] = {}
        for at in range(0, len(documents), batch):
            for name, array in note_places(documents[at : at + batch], ordinals[at : at + batch]).items():
                gathered.setdefault(name, []).append(array)
        noted.append((first, {name: np.concatenate(arrays) for name, arrays in gathered.items()}))
        expected |= {first + 2 * i: document.place for i, document in enumerate(documents)}
        first += 2 * len(documents)
    places = Places(tmp_path_factory.mktemp("places") / "table", [noted[0], (0, {}), *noted[1:]])
    assert {number: places.place(number) for number in expected} == expected
    packed = places.pack(np.array(list(expected), np.int64))
    assert [unpack(packed, i) for i in range(len(expected))] == list(expected.values())


def test_rows_that_run_on_take_one_record_a_batch(tmp_path: Path) -> None:
    documents = [Document("", "a.jsonl", row) for row in range(1, 1001)]
    noted = [note_places(documents[at : at + 100], np.arange(at, at + 100)) for at in range(0, 1000, 100)]
    Places(tmp_path / "table", [(0, one) for one in noted])
    assert (tmp_path / "table" / "number").stat().st_size == 8 * len(noted)


def test_nothing_noted(tmp_path: Path) -> None:
    places = Places(tmp_path / "table", [(0, {})])
    assert places.pack(np.empty(0, np.int64))["of_row"].size == 0
