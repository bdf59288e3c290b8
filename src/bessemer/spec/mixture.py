"""How a mixture of sources becomes whole numbers.

Weights are what the user writes; counts per block are what the stream obeys. The planner quantises once and
prints the realised shares; `bessemer.data.order` deals sequences from the counts, in integer arithmetic only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from bessemer.errors import UserError

MAX_BLOCK = 65_536
TOLERANCE = Fraction(1, 100)


@dataclass(frozen=True)
class Mixture:
    """In every `block` consecutive sequences, source `names[k]` has exactly `counts[k]`."""

    names: tuple[str, ...]
    counts: tuple[int, ...]
    block: int

    def __post_init__(self) -> None:
        if len(self.names) != len(self.counts) or len(set(self.names)) != len(self.names):
            raise ValueError(f"a mixture needs one count per distinct name: {self.names}, {self.counts}")
        if min(self.counts, default=0) < 1 or sum(self.counts) != self.block or self.block > MAX_BLOCK:
            raise ValueError(f"counts {self.counts} must be 1 or more and add up to the block, {self.block}")

    @property
    def shares(self) -> dict[str, float]:
        """The realised share of each source, exact over a block."""
        return {name: count / self.block for name, count in zip(self.names, self.counts, strict=True)}


def quantise(weights: Mapping[str, float]) -> Mixture:
    """The smallest power-of-two block in which every share is within 1 % (relative) of its weight's.

    Weights need not add up to 1. A source too small for the largest block still gets one sequence in it. The
    counts do not depend on the order of the weights, so reordering a spec never changes a stream.
    """
    exact = _exact(weights)
    total = sum(exact.values(), Fraction())
    block = 1
    while block < len(exact):
        block *= 2
    counts = _apportion(exact, block)
    while block < MAX_BLOCK and not _close(exact, total, counts, block):
        block *= 2
        counts = _apportion(exact, block)
    return Mixture(tuple(exact), tuple(counts[name] for name in exact), block)


def share_out(counts: Mapping[str, int], total: int, limits: Mapping[str, int]) -> dict[str, int]:
    """`total` sequences in proportion to `counts`, by largest remainder, none above its limit; zeros are left out.

    What a limited source cannot take goes to the others; the result adds up to less only where all are limited.
    """
    dealt = dict.fromkeys(counts, 0)
    free = {name: count for name, count in counts.items() if limits.get(name, 1) > 0}
    left = total
    while left and free:
        whole = sum(free.values())
        quotas = {name: Fraction(left * count, whole) for name, count in free.items()}
        full = {name for name in free if name in limits and dealt[name] + quotas[name] >= limits[name]}
        if full:  # these take what they may, and the rest is shared out anew
            for name in full:
                left -= limits[name] - dealt[name]
                dealt[name] = limits[name]
                del free[name]
            continue
        for name, quota in quotas.items():
            dealt[name] += math.floor(quota)
        by_remainder = sorted(free, key=lambda name: (math.floor(quotas[name]) - quotas[name], name))
        for name in by_remainder[: left - sum(math.floor(quota) for quota in quotas.values())]:
            dealt[name] += 1  # within the limit: the quota lies below it, and the limit is a whole number
        left = 0
    return {name: count for name, count in dealt.items() if count}


def _exact(weights: Mapping[str, float]) -> dict[str, Fraction]:
    if not weights:
        raise UserError("the mixture has no sources: give at least one source with a positive weight")
    if len(weights) > MAX_BLOCK:
        raise UserError(f"the mixture has {len(weights):,} sources: merge them to at most {MAX_BLOCK:,}")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight <= 0:
            raise UserError(f"mixture weight of {name!r} is {weight}: write a positive number or remove it")
    return {name: Fraction(weight) for name, weight in weights.items()}


def _apportion(exact: dict[str, Fraction], block: int) -> dict[str, int]:
    """Largest remainder with at least one each; lifting the smallest to one scales the others down."""
    counts: dict[str, int] = {}
    rest = dict(exact)
    while rest:
        unit = (block - len(counts)) / sum(rest.values())
        small = [name for name, weight in rest.items() if weight * unit < 1]
        if not small:
            break
        for name in small:
            counts[name] = 1
            del rest[name]
    quotas = {name: weight * unit for name, weight in rest.items()}
    counts |= {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(rest, key=lambda name: (math.floor(quotas[name]) - quotas[name], name))
    for name in by_remainder[: block - sum(counts.values())]:
        counts[name] += 1
    return counts


def _close(exact: dict[str, Fraction], total: Fraction, counts: dict[str, int], block: int) -> bool:
    return all(
        abs(Fraction(counts[name], block) - weight / total) <= TOLERANCE * weight / total
        for name, weight in exact.items()
    )
