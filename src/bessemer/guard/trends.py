"""Trends of a run's metrics over blocks of 8 steps, measured in units of their own noise.

A block holds each metric's median. The noise of a block is estimated twice, from the differences of successive blocks
(whose median, the trend, is subtracted) and from the spread within blocks, and the larger one counts. All results are
ratios, so a metric may have any unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bessemer.guard.alarm import Record, median, robust_std

SPAN = 8  # steps of a block
MAX_BLOCKS = 128  # the first one is never dropped
RECENT = 6  # blocks of a recent change
SIGNIFICANT = 4.0  # noise units
Block = dict[str, float]  # "step" and "end", medians by name, and the spread of each as "~name"
SPREAD = "~"


@dataclass(frozen=True)
class Change:
    before: float
    now: float
    noise: float

    @property
    def size(self) -> float:
        return self.now - self.before

    @property
    def z(self) -> float:
        return self.size / self.noise

    @property
    def rose(self) -> bool:
        return self.z > SIGNIFICANT

    @property
    def fell(self) -> bool:
        return self.z < -SIGNIFICANT


def make_block(records: Sequence[Record], names: Sequence[str]) -> Block:
    """The medians of accepted steps."""
    block: Block = {"step": records[0]["step"], "end": records[-1]["step"]}
    for name in names:
        values = [float(record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
        if 2 * len(values) >= len(records):
            block[name], block[SPREAD + name] = median(values), robust_std(values)
    return block


def column(blocks: Sequence[Block], name: str) -> list[float]:
    return [block[name] for block in blocks if name in block]


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of neighbours."""
    return [(a + b) / 2 for a, b in pairwise(values)]


def noise(blocks: Sequence[Block], name: str) -> float:
    """The standard deviation of a block's value."""
    values = column(blocks, name)
    steps = [b - a for a, b in pairwise(values)]
    between = robust_std(steps) / math.sqrt(2) if len(steps) >= 4 else 0.0
    within = 1.2533 * median(column(blocks, SPREAD + name)) / math.sqrt(SPAN)
    return max(between, within, 1e-6 * max(map(abs, values)), 1e-12)


def change(blocks: Sequence[Block], name: str) -> Change | None:
    """From the first block to the mean of the last two; None without enough blocks."""
    values = column(blocks, name)
    if len(values) < 3:
        return None
    return Change(values[0], smoothed(values)[-1], 1.22 * noise(blocks, name))


def recent_change(blocks: Sequence[Block], name: str) -> Change | None:
    """Over the last RECENT blocks, between the means of two."""
    means = smoothed(column(blocks, name)[-RECENT:])
    return Change(means[0], means[-1], noise(blocks, name)) if len(means) >= 3 else None


def fall_from_best(blocks: Sequence[Block], name: str) -> tuple[Change, int] | None:
    """The change since the best earlier mean of two blocks, and the first of these blocks' number."""
    present = [i for i, block in enumerate(blocks) if name in block]
    means = smoothed(column(blocks, name))
    if len(means) < 4:
        return None
    best = max(range(len(means) - 2), key=means.__getitem__)
    return Change(means[best], means[-1], noise(blocks, name)), present[best]
