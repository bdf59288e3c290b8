"""Agreement of annotators beyond chance: Cohen's kappa for two, Fleiss' for more.

Landis and Koch 1977 call kappa up to 0.2 slight, to 0.4 fair, to 0.6 moderate, to 0.8 substantial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

FAIR = 0.4


@dataclass(frozen=True)
class Agreement:
    """`kappa` is None where all votes are the same, of which no chance agreement can be told."""

    kappa: float | None
    annotators: int
    rows: int
    left_out: int  # rows with another number of votes
    equal: float  # share of the rows whose votes are all the same

    def line(self) -> str:
        method = "Cohen's" if self.annotators == 2 else "Fleiss'"
        value = "undefined, all votes are the same" if self.kappa is None else f"{self.kappa:.2f}"
        more = f", {self.left_out:,} rows with another number of votes left out" if self.left_out else ""
        scope = f"{self.annotators} annotators, {self.rows:,} rows, {self.equal:.0%} unanimous{more}"
        return f"agreement of annotators: {method} kappa {value} ({scope})"


def measure_agreement(votes: Sequence[Sequence[str]]) -> Agreement | None:
    """Of rows with their votes, in the order of the annotators. Uses the rows with the most frequent number of votes;
    None where no row has two."""
    sizes = Counter(len(row) for row in votes if len(row) > 1)
    if not sizes:
        return None
    annotators = max(sizes, key=lambda size: (sizes[size], size))
    rows = [row for row in votes if len(row) == annotators]
    kappa = cohen_kappa([row[0] for row in rows], [row[1] for row in rows]) if annotators == 2 else fleiss_kappa(rows)
    equal = sum(len(set(row)) == 1 for row in rows) / len(rows)
    return Agreement(kappa, annotators, len(rows), len(votes) - len(rows), equal)


def cohen_kappa(first: Sequence[str], second: Sequence[str]) -> float | None:
    """Cohen 1960: (p_o - p_e) / (1 - p_e), with chance agreement from each annotator's own shares."""
    count, shares = len(first), (Counter(first), Counter(second))
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    expected = sum(shares[0][label] * shares[1][label] for label in shares[0]) / count**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def fleiss_kappa(rows: Sequence[Sequence[str]]) -> float | None:
    """Fleiss 1971: the share of agreeing pairs of votes, against that of the labels' shares over all rows."""
    size, totals = len(rows[0]), Counter(vote for row in rows for vote in row)
    agreeing = [sum(n * (n - 1) for n in Counter(row).values()) / (size * (size - 1)) for row in rows]
    observed = sum(agreeing) / len(rows)
    expected = sum((count / (size * len(rows))) ** 2 for count in totals.values())
    return None if expected == 1 else (observed - expected) / (1 - expected)
