"""Statistics of scores per question: errors with clusters, intervals, paired tests, power, calibration.

Formulas as in Miller, "Adding Error Bars to Evals" (2024). A score is a mean over questions; questions that share a
text (a cluster) are not independent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.statistics import DRAWS, Z_95, Interval, bootstrap_interval, sign_test, wilson_interval

Floats = npt.NDArray[np.float64]
Clusters = Sequence[Hashable] | None
Z_POWER_80 = 0.8416212335729143  # 80 % quantile of the normal distribution
PAIRED_VARIANCE = 1 / 9  # of the differences of two models of similar quality (Miller 2024)
BINS = 15


def standard_error(values: Sequence[float], clusters: Clusters = None) -> float:
    """The standard error of the mean. With clusters, their residuals are summed before they are squared."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return math.nan
    residuals = array - array.mean()
    if clusters is None:
        return float(np.sqrt(np.square(residuals).sum() / (len(array) * (len(array) - 1))))
    return float(np.sqrt(np.square(_cluster_sums(residuals, clusters)).sum()) / len(array))


def _cluster_sums(values: Floats, clusters: Sequence[Hashable]) -> Floats:
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    sums: Floats = np.zeros(len(numbers))
    np.add.at(sums, [numbers[cluster] for cluster in clusters], values)
    return sums


def effective_questions(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """How many independent questions would have the clustered error; that many clusters if all values are equal."""
    alone, grouped = standard_error(values), standard_error(values, clusters)
    return len(values) / max(1.0, (grouped / alone) ** 2) if alone > 0 else float(len(set(clusters)))


def clustered_bootstrap(values: Sequence[float], clusters: Sequence[Hashable], seed: int = 0) -> Interval:
    """The 95 % percentile interval of the mean, with complete clusters resampled."""
    array = np.asarray(values, np.float64)
    sums, counts = _cluster_sums(array, clusters), _cluster_sums(np.ones_like(array), clusters)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (DRAWS, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def score_interval(values: Sequence[float], clusters: Clusters = None, seed: int = 0) -> tuple[Interval, str]:
    """The 95 % interval of a mean score and how it was computed: Wilson's for yes and no, else the bootstrap."""
    if not len(values):
        return (math.nan, math.nan), "none"
    binary = set(values) <= {0.0, 1.0}
    if clusters is not None and len(set(clusters)) < len(values):
        if binary:
            effective = effective_questions(values, clusters)
            hits = math.fsum(values) * effective / len(values)
            return wilson_interval(hits, effective), "Wilson, with the effective number of questions"
        return clustered_bootstrap(values, clusters, seed), "bootstrap over clusters"
    if binary:
        return wilson_interval(int(sum(values)), len(values)), "Wilson"
    return bootstrap_interval(values, seed), "bootstrap"


@dataclass(frozen=True)
class PairedTest:
    """Two models on the same questions: the mean of b - a, its standard error and 95 % bootstrap interval, and a
    p-value: McNemar's exact test for yes and no, else the normal test of the paired differences."""

    difference: float
    error: float
    interval: Interval
    p: float
    test: str

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float], clusters: Clusters = None, seed: int = 0) -> PairedTest:
        differences = [late - early for early, late in zip(a, b, strict=True)]
        error = standard_error(differences, clusters)
        mean = math.fsum(differences) / len(differences)
        grouped = clusters is not None and len(set(clusters)) < len(differences)
        if grouped:
            assert clusters is not None
            interval = clustered_bootstrap(differences, clusters, seed)
        else:
            interval = bootstrap_interval(differences, seed)
        if not grouped and {*a, *b} <= {0.0, 1.0}:
            p = sign_test(sum(each > 0 for each in differences), sum(each < 0 for each in differences))
            return cls(mean, error, interval, p, "McNemar exact")
        p = 1.0 if not any(differences) else math.erfc(abs(mean) / error / math.sqrt(2)) if error else 0.0
        return cls(mean, error, interval, p, "paired, clustered" if grouped else "paired")

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {"difference": self.difference, "stderr": self.error, "low": low, "high": high, "p": self.p,
                "test": self.test}  # fmt: skip


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979): reject those below the level; at most 5 % of such tables then
    hold a false difference."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = highest
    return adjusted


def detectable_difference(questions: int, variance: float = PAIRED_VARIANCE) -> float:
    """The smallest true difference of two models that a paired test at 5 % sees in 80 % of cases. `variance` is that of
    the differences per question."""
    return (Z_95 + Z_POWER_80) * math.sqrt(variance / questions) if questions else math.nan


def questions_needed(difference: float, variance: float = PAIRED_VARIANCE) -> int:
    """The number of questions with which `detectable_difference` is this difference."""
    return math.ceil((Z_95 + Z_POWER_80) ** 2 * variance / difference**2)


def calibration_error(confidences: Sequence[float], right: Sequence[float], bins: int = BINS) -> float:
    """ECE: the mean distance of confidence and accuracy over bins of equally many questions. Biased upwards for few
    questions: at 15 bins of 10, a calibrated model has about 0.1."""
    if not len(confidences):
        return math.nan
    order = np.argsort(np.asarray(confidences, np.float64), kind="stable")
    confidence, correct = np.asarray(confidences, np.float64)[order], np.asarray(right, np.float64)[order]
    edges = np.linspace(0, len(order), min(bins, len(order)) + 1).round().astype(int)
    gaps = [abs(confidence[a:b].sum() - correct[a:b].sum()) for a, b in itertools.pairwise(edges)]
    return float(sum(gaps) / len(order))


def choice_confidence(logps: Sequence[float]) -> float:
    """The probability of the likeliest choice among the choices."""
    highest = max(logps)
    return 1.0 / math.fsum(math.exp(logp - highest) for logp in logps)
