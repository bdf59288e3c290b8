"""Shares keep exactly as many documents as they say, the same ones for any division of the work."""

from __future__ import annotations

import json
import math
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bessemer.data.curate.scores import threshold as selection
from bessemer.data.curate.scores.threshold import BINS, ScoreRanking, Threshold, find_cut, group_parts, score_at_cut
from bessemer.data.curate.step import Collected, Drop
from bessemer.data.read.entry import Document
from bessemer.spec.curate.scores import Bounds


def here(function: Any, tasks: Any) -> list[Any]:
    return [function(task) for task in tasks]


def collect(folder: Path, parts: list[list[float | None]], sources: list[str] | None = None) -> list[Collected]:
    """Parts of scores by ordinal; None is a document that an earlier step has dropped."""
    found = []
    for number, scores in enumerate(parts):
        ordinals = [i for i, score in enumerate(scores) if score is not None]
        arrays = {"ordinal": np.array(ordinals, np.int64), "score": np.array([scores[i] for i in ordinals], np.float64)}
        path = folder / f"{number}.npz"
        np.savez(path, **(arrays if ordinals else {}))
        found.append(Collected(number, path, sources[number] if sources else "web", len(scores)))
    return found


def outcomes(
    threshold: Threshold,
    folder: Path,
    parts: list[list[float | None]],
    sources: list[str] | None = None,
    batch: int = 3,
) -> tuple[list[list[Any]], dict[str, Any], list[list[Document]]]:
    decisions_by_part, summary = threshold.resolve(collect(folder, parts, sources), here)
    json.dumps(summary)
    found, seen = [], []
    for scores, decisions in zip(parts, decisions_by_part, strict=True):
        ordinals = [i for i, score in enumerate(scores) if score is not None]
        documents = [Document(f"text {i}", "f", i + 1) for i in ordinals]
        part = []
        for at in range(0, len(ordinals), batch):
            part += threshold.apply(documents[at : at + batch], np.array(ordinals[at : at + batch]), decisions)
        found.append(part)
        seen.append(documents)
    return found, summary, seen


scores_ = st.one_of(
    st.integers(0, 3).map(float),  # many ties
    st.floats(-1e300, 1e300),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.0, math.nextafter(1.0, 2.0)]),
)
parts_ = st.lists(st.lists(st.none() | scores_, max_size=12), min_size=1, max_size=5)


@settings(max_examples=80)
@given(
    parts_, st.integers(1, 100), st.booleans(), st.sampled_from([1, 2, 10, 1000]), st.integers(1, 3), st.integers(1, 5)
)
def test_exactly_the_best_share_is_kept(
    parts: list[list[float | None]], percent: int, lower: bool, gathered: int, tasks: int, batch: int
) -> None:
    total = sum(score is not None for scores in parts for score in scores)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(selection, "_MOST_GATHERED", gathered)
        patch.setattr(selection, "_MOST_TASKS", tasks)
        threshold = Threshold("quality", f"best {percent}%", "corpus", 0, lower)
        found, summary, _ = outcomes(threshold, Path(folder), parts, batch=batch)
    flat = [outcome for part in found for outcome in part]
    given_ = [score for scores in parts for score in scores if score is not None]
    kept = [score for score, outcome in zip(given_, flat, strict=True) if outcome is None]
    gone = [score for score, outcome in zip(given_, flat, strict=True) if outcome is not None]
    assert len(kept) == math.ceil(Fraction(percent, 100) * total) == summary["kept"]
    if kept and gone:
        assert max(kept) <= min(gone) if lower else min(kept) >= max(gone)
    if kept:
        assert summary["threshold"] == (max(kept) if lower else min(kept))
        assert sum(summary["histogram"]) == total == summary["documents"]
    # The same documents, whatever the passes: the order of equal ones is a hash of their place.
    with tempfile.TemporaryDirectory() as folder:
        again, _, _ = outcomes(Threshold("quality", f"best {percent}%", "corpus", 0, lower), Path(folder), parts)
    assert again == found


def test_a_tenth_of_thirty_is_three(tmp_path: Path) -> None:
    """0.1 * 30 is a little more than 3 in binary."""
    parts: list[list[float | None]] = [[float(i) for i in range(30)]]
    found, summary, _ = outcomes(Threshold("q", "best 10%", "corpus", 0), tmp_path, parts)
    assert summary["kept"] == 3 and summary["kept_share"] == 0.1 and summary["threshold"] == 27.0
    assert [i for i, outcome in enumerate(found[0]) if outcome is None] == [27, 28, 29]
    assert found[0][0] == Drop("q below the best 10 %", 0.0)
    _, summary, _ = outcomes(Threshold("q", "best 10.1%", "corpus", 0), tmp_path, parts)
    assert summary["kept"] == 4  # rounded up: a share above nothing keeps something


def test_ties_favour_no_part(tmp_path: Path) -> None:
    parts: list[list[float | None]] = [[1.0] * 1000, [1.0] * 1000, [0.0] * 100]
    found, summary, _ = outcomes(Threshold("q", "best 50%", "corpus", 0), tmp_path, parts, batch=700)
    kept = [sum(outcome is None for outcome in part) for part in found]
    assert sum(kept) == 1050 == summary["kept"] and kept[2] == 0
    assert 450 < kept[0] < 600
    places = [i for i, outcome in enumerate(found[0]) if outcome is None]
    assert 400 < np.mean(places) < 600
    elsewhere = [i for i, outcome in enumerate(found[1]) if outcome is None]
    assert len(set(places) & set(elsewhere)) < 0.7 * len(places)
    other, _, _ = outcomes(Threshold("q", "best 50%", "corpus", 1), tmp_path, parts)
    assert other != found


def test_shares_of_each_source(tmp_path: Path) -> None:
    parts: list[list[float | None]] = [[1.0, 2.0, None, 3.0, 4.0], [10.0, 20.0], [30.0, 40.0], []]
    sources = ["web", "books", "books", "none"]
    found, summary, _ = outcomes(Threshold("q", "best 50%", "source", 0), tmp_path, parts, sources)
    kept = [[outcome is None for outcome in part] for part in found]
    assert kept == [[False, False, True, True], [False, False], [True, True], []]
    assert summary["sources"]["web"]["threshold"] == 3.0 and summary["sources"]["books"]["threshold"] == 30.0
    assert summary["sources"]["none"] == {"documents": 0, "kept": 0}
    assert found[0][0].reason == "q below the best 50 % of its source"
    found, summary, _ = outcomes(Threshold("q", "best 50%", "corpus", 0), tmp_path, parts, sources)
    assert [sum(outcome is None for outcome in part) for part in found] == [0, 2, 2, 0]


def test_bounds_at_below_and_above(tmp_path: Path) -> None:
    parts: list[list[float | None]] = [[0.49, 0.5, 0.51, 0.9, 0.91]]
    found, summary, documents = outcomes(Threshold("q", 0.5, "corpus", 0), tmp_path, parts)
    assert found[0] == [Drop("q below 0.5", 0.49), None, None, None, None]
    assert summary["kept"] == 4 and summary["threshold"] == 0.5
    assert [document.labels for document in documents[0]] == [{}, {"q": 0.5}, {"q": 0.51}, {"q": 0.9}, {"q": 0.91}]
    found, summary, _ = outcomes(Threshold("q", Bounds(min=0.5, max=0.9), "corpus", 0), tmp_path, parts)
    assert [outcome.reason if outcome else None for outcome in found[0]] == [
        "q below 0.5", None, None, None, "q above 0.9",
    ]  # fmt: skip
    assert summary["kept"] == 3 and summary["threshold"] == [0.5, 0.9]
    found, summary, documents = outcomes(Threshold("q", None, "corpus", 0), tmp_path, parts)
    assert found[0] == [None] * 5 and summary["kept"] == 5 and "threshold" not in summary
    assert documents[0][0].labels == {"q": 0.49}


def test_the_histogram_spans_what_was_found(tmp_path: Path) -> None:
    parts: list[list[float | None]] = [[0.0, 0.04, 1.0], [0.5, 0.96]]
    _, summary, _ = outcomes(Threshold("q", None, "corpus", 0), tmp_path, parts)
    expected = [0] * BINS
    expected[0], expected[10], expected[19] = 2, 1, 2
    assert summary["histogram"] == expected and (summary["lowest"], summary["highest"]) == (0.0, 1.0)
    _, summary, _ = outcomes(Threshold("q", None, "corpus", 0), tmp_path, [[2.0, 2.0]])
    assert summary["histogram"] == [2] + [0] * (BINS - 1)
    _, summary, _ = outcomes(Threshold("q", None, "corpus", 0), tmp_path, [[-1.7e308, 1.7e308]])
    assert sum(summary["histogram"]) == 2


def test_nothing_to_score(tmp_path: Path) -> None:
    for parts in ([], [[]], [[None, None]]):
        found, summary, _ = outcomes(Threshold("q", "best 50%", "corpus", 0), tmp_path, parts)
        assert all(not part for part in found) and summary == {"documents": 0, "kept": 0}


def test_parts_from_the_best_down(tmp_path: Path) -> None:
    threshold = Threshold("p", None, "corpus", 0, lower_is_better=True, parts=[("head", 0.3), ("middle", 0.3)])
    _, summary, documents = outcomes(threshold, tmp_path, [[float(i) for i in range(10)]])
    assert [d.labels["p_part"] for d in documents[0]] == ["head"] * 3 + ["middle"] * 3 + ["tail"] * 4
    assert (summary["head_threshold"], summary["middle_threshold"]) == (2.0, 5.0)
    threshold = Threshold("p", None, "corpus", 0, lower_is_better=True, parts=[("head", 0.0), ("middle", 0.0)])
    _, _, documents = outcomes(threshold, tmp_path, [[1.0, 2.0]])
    assert [d.labels["p_part"] for d in documents[0]] == ["tail", "tail"]


@given(
    st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
@example(0.0, -0.0, False)
def test_keys_are_in_the_order_of_the_scores(a: float, b: float, lower: bool) -> None:
    ranking = ScoreRanking(lower, 0)
    one, other = ranking.keys(np.array([a, b])).tolist()
    assert (one > other) == ((a < b) if lower else (a > b)) and (one == other) == (a == b)
    assert score_at_cut(np.array([one, 0, 0, 0], np.uint64), ranking) == a


def test_many_parts_make_few_tasks(tmp_path: Path) -> None:
    parts = [Collected(i, tmp_path, "s", 1) for i in range(1300)]
    groups = group_parts(parts)
    assert len(groups) == 512 and [part for group in groups for part in group] == parts
    assert group_parts([]) == [] and len(group_parts(parts[:3])) == 3


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back from the workers is a histogram, or the few records that are left."""
    monkeypatch.setattr(selection, "_MOST_GATHERED", 1000)
    chance = np.random.default_rng(0)
    for kind in ("spread", "equal"):
        scores = [chance.random(20_000) if kind == "spread" else np.zeros(20_000) for _ in range(4)]
        parts = collect(tmp_path, [list(part) for part in scores])
        largest = 0

        def watched(function: Any, tasks: Any) -> list[Any]:
            nonlocal largest
            found = here(function, tasks)
            largest = max(largest, sum(array.nbytes for array in found))
            return found

        ranking = ScoreRanking(False, 0)
        cut = find_cut(parts, 12_345, 80_000, ranking, watched)
        kept = sum(int(ranking.reach(part, i, np.arange(20_000), cut).sum()) for i, part in enumerate(scores))
        assert kept == 12_345
        assert largest <= max(4 * 4096 * 8, 1000 * 32)
