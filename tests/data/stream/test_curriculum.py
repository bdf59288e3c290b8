"""Rankings against a plain sort of plainly computed measures."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.stream import curriculum
from bessemer.data.stream.curriculum import curriculum_note, length_score, measure_by_score, rank_rows, ranking_name
from bessemer.data.stream.order import CurriculumRanking
from bessemer.data.stream.rows import PADDING, Ints, Spans
from bessemer.errors import UserError


class Windows:
    """Rows of T columns over documents of given lengths, one after another; -1 stands for padding."""

    packing = "concat"

    def __init__(self, documents: list[int], length: int) -> None:
        self.of_column = np.asarray(documents, dtype=np.int64)
        self.length = length
        self.count = self.of_column.size // length
        self.fingerprint = str(documents)

    def spans(self, sequences: Ints, /) -> Spans:
        found = []
        for row, sequence in enumerate(sequences.tolist()):
            cells = self.of_column[sequence * self.length : (sequence + 1) * self.length]
            edges = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist(), self.length]
            found += [(row, a, b - a, cells[a]) for a, b in pairwise(edges)]
        row, column, length, document = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return Spans(row, column, length, document, np.where(document == PADDING, 0, length))


def slow_measure(rows: Windows, sequence: int, scores: list[float]) -> float:
    cells = rows.of_column[sequence * rows.length : (sequence + 1) * rows.length].tolist()
    known = [scores[document] for document in cells if document != PADDING and scores[document] == scores[document]]
    return sum(known) / len(known) if known else -np.inf


cases = st.tuples(
    st.lists(st.integers(PADDING, 5), min_size=4, max_size=300),
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-30, 3e7, -1e9, np.nan]) | st.floats(-1e6, 1e6, width=32),
        min_size=6,
        max_size=6,
    ),
)


@settings(max_examples=80)
@given(cases, st.booleans(), st.sampled_from([3, 7, 1 << 20]))
def test_a_ranking_is_the_stable_sort_of_the_measures(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[int], list[float]], descending: bool, chunk: int
) -> None:
    documents, scores = case
    rows = Windows(documents, 4)
    folder = tmp_path_factory.mktemp("ranking")
    measure = measure_by_score(rows, lambda documents: np.array(scores)[documents])
    expected = [np.float32(slow_measure(rows, k, scores)) + np.float32(0) for k in range(rows.count)]
    with pytest.MonkeyPatch.context() as patch:  # small chunks, so that the passes meet their edges
        patch.setattr(curriculum, "_CHUNK", chunk)
        patch.setattr(curriculum, "_COLUMNS", 4 * chunk)
        if max(expected) == -np.inf:
            with pytest.raises(UserError, match="no document has a 'quality'"):
                rank_rows(rows, "quality", measure, folder, 8, descending)
            assert list(folder.iterdir()) == []  # nothing is left behind
            return
        ranking = rank_rows(rows, "quality", measure, folder, 8, descending)
    by_hand = sorted(range(rows.count), key=lambda k: -expected[k] if descending else expected[k])
    assert ranking.sequences.tolist() == by_hand
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".json"]


def test_the_measure_is_the_mean_by_tokens() -> None:
    rows = Windows([0, 0, 0, 1, 1, 2, 2, PADDING], 4)
    found = measure_by_score(rows, lambda d: np.array([10.0, 2.0, np.nan])[d])(np.array([1, 0]))
    assert found.tolist() == [2.0, 8.0]  # a document without a score does not count


def test_a_ranking_is_computed_once_and_told_apart(tmp_path: Path) -> None:
    rows, calls = Windows(list(range(8)) * 4, 4), []

    def score(sequences: Ints) -> np.ndarray:
        calls.append(sequences.size)
        return -sequences.astype(np.float64)

    first = rank_rows(rows, "length", score, tmp_path, 2)
    again = rank_rows(rows, "length", score, tmp_path, 4, run=3)  # groups and runs need no other ranking
    assert len(calls) == 1
    assert first.fingerprint == again.fingerprint and (again.groups, again.run) == (4, 3)
    assert rank_rows(rows, "length", score, tmp_path, 2, descending=True).fingerprint != first.fingerprint
    rank_rows(rows, "quality", score, tmp_path, 2)
    rank_rows(Windows(list(range(8)) * 4, 2), "length", score, tmp_path, 2)
    assert len(calls) == 4 and len(list(tmp_path.glob("*.bin"))) == 4


def test_a_damaged_ranking_is_computed_again(tmp_path: Path) -> None:
    rows = Windows(list(range(8)) * 4, 4)

    def rank(descending: bool = False) -> CurriculumRanking:
        return rank_rows(rows, "length", lambda sequences: -sequences.astype(np.float64), tmp_path, 2, descending)

    first, other = rank(), rank(descending=True)
    path = tmp_path / ranking_name(rows, "length", False)
    swapped = (tmp_path / ranking_name(rows, "length", True)).read_bytes()
    for content in (b"123", swapped, path.read_bytes()[:-1] + b"\1"):
        path.write_bytes(content)
        assert rank().fingerprint == first.fingerprint != other.fingerprint
    path.with_suffix(".json").unlink()  # as earlier versions left it
    assert rank().fingerprint == first.fingerprint
    path.write_bytes(b"123")
    with pytest.raises(UserError, match="3 bytes instead of"):
        rank()


def test_both_zeros_are_one_measure(tmp_path: Path) -> None:
    zeros = np.array([0.0, -0.0, 0.0, -1.0])
    ranking = rank_rows(Windows([0] * 16, 4), "sign", lambda sequences: zeros[sequences], tmp_path, 1)
    assert ranking.sequences.tolist() == [3, 0, 1, 2]


def test_documents_are_as_long_as_the_store_says() -> None:
    class Store:
        def extents(self, documents: Ints) -> tuple[Ints, Ints]:
            starts = np.array([0, 5, 6, 20])
            return starts[documents], starts[documents + 1]

    assert length_score(Store())(np.array([2, 0, 1])).tolist() == [14, 5, 1]  # type: ignore[arg-type]


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without one row"):
        rank_rows(Windows([1, 2, 3], 4), "length", lambda d: d, tmp_path, 2)


def test_a_run_shorter_than_the_curriculum_is_told() -> None:
    assert curriculum_note(100, 100, "length", False) is None
    note = curriculum_note(100, 25, "length", False)
    assert note is not None and "reads 25% of one" in note and "75% of the highest length" in note
    assert "lowest quality" in str(curriculum_note(100, 25, "quality", True))
