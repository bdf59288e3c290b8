"""Kappa against formulas written out with numpy, and published examples."""

import numpy as np
import pytest

from bessemer.data.agreement import cohen_kappa, fleiss_kappa, measure_agreement

# Fleiss 1971, as on Wikipedia: 10 subjects, 14 raters, 5 categories; kappa 0.210.
FLEISS = [
    [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1], [7, 7, 0, 0, 0],
    [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
]  # fmt: skip


def confusion_kappa(first: list[str], second: list[str]) -> float:
    """As sklearn's cohen_kappa_score computes it: from the confusion matrix and its margins."""
    labels = sorted({*first, *second})
    matrix = np.zeros((len(labels), len(labels)))
    for a, b in zip(first, second, strict=True):
        matrix[labels.index(a), labels.index(b)] += 1
    expected = np.outer(matrix.sum(0), matrix.sum(1)) / matrix.sum()
    weights = 1 - np.eye(len(labels))
    return float(1 - (weights * matrix).sum() / (weights * expected).sum())


def test_cohen() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        first = draw.choice(list("abc"), 60, p=[0.5, 0.3, 0.2]).tolist()
        second = [a if draw.random() < 0.6 else str(draw.choice(list("abc"))) for a in first]
        assert cohen_kappa(first, second) == pytest.approx(confusion_kappa(first, second), abs=1e-12)
    votes = [*"yyyyyyyyyyyyyyyyyyyyyyyyy", *"nnnnnnnnnnnnnnnnnnnnnnnnn"]  # the example of Wikipedia: 20, 5, 10, 15
    other = ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert cohen_kappa(votes, other) == pytest.approx(0.4)
    assert cohen_kappa(["a"] * 3, ["a"] * 3) is None


def test_fleiss() -> None:
    rows = [[str(label) for label, count in enumerate(counts) for _ in range(count)] for counts in FLEISS]
    counts = np.array(FLEISS, float)
    shares = counts.sum(0) / counts.sum()
    agreeing = ((counts**2).sum(1) - 14) / (14 * 13)
    expected = (agreeing.mean() - (shares**2).sum()) / (1 - (shares**2).sum())
    assert fleiss_kappa(rows) == pytest.approx(expected, abs=1e-12) and expected == pytest.approx(0.210, abs=5e-4)


def test_rows_with_another_number_of_votes_are_left_out() -> None:
    votes = [["a", "a"], ["a", "b"], ["b", "b"], ["a"], ["a", "b", "b"]]
    agreement = measure_agreement(votes)
    assert agreement is not None and (agreement.annotators, agreement.rows, agreement.left_out) == (2, 3, 2)
    assert "Cohen's kappa 0.40 (2 annotators, 3 rows, 67% unanimous, 2 rows" in agreement.line()
    assert measure_agreement([["a"], []]) is None
    unanimous = measure_agreement([["a", "a", "a"]])
    assert unanimous is not None and unanimous.kappa is None and "undefined" in unanimous.line()
