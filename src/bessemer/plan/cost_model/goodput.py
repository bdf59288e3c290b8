"""Goodput: the share of time that a run trains, given failures, restarts, saves and preemptions; and how often to save.

The save interval is Young's and Daly's optimum between saving time and work lost to failures. `checkpoint.every: auto`
starts from published failure rates and adapts to the run's own saves and interruptions.

Where little time is lost, the goodput equals the formula of Kokolis et al. 2025 (Revisiting reliability, HPCA): with N
nodes that fail r times a day, restarts of u0 and saves of w every dt, E[ETTR] = (1 - N r (u0 + dt / 2)) / (1 + w / dt).
`effective_share` follows the renewals of a run instead, and stays between 0 and 1 at any failure rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.errors import UserError

DAY_S = 86_400.0
# Published clusters report 4 to 6.5 failures in 1,000 node-days. The prior is the middle, weighted as one failure.
PRIOR_FAILURES = 1.0
PRIOR_NODE_DAYS = 1000 / 5.25
FIRST_S = 600.0  # until a save has been measured
SHORTEST_S = 30.0
LONGEST_S = 1800.0  # workstations fail more often than the published clusters
LARGEST_SHARE = 0.005  # of the time that saves may take when LONGEST_S shortens the optimal interval
USUAL = 5.25e-3  # failures per node of 8 GPUs and day, the middle of the published 4 to 6.5 in 1,000
RESTART_S = 600.0  # MegaScale 2024: detected in under 10 minutes; restart and catch-up under 15
SAVE_STALL_S = 10.0  # asynchronous saves block a run only for the copy


def young_daly(stall_s: float, mtti_s: float) -> float:
    """Optimal seconds of work between saves: Daly's higher-order form (2006, eq. 37).

    `stall_s` is how long a save blocks the run, `mtti_s` the job's mean time to interruption.
    """
    if stall_s >= 2 * mtti_s:
        return mtti_s
    ratio = stall_s / (2 * mtti_s)
    return math.sqrt(2 * stall_s * mtti_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def mean_time_to_interruption(nodes: int, failures: int, observed_s: float) -> float:
    """Seconds, for a job of `nodes` nodes with `failures` in `observed_s`: the prior updated by the observation."""
    node_days = PRIOR_NODE_DAYS + nodes * observed_s / DAY_S
    return node_days / (PRIOR_FAILURES + failures) * DAY_S / nodes


def count_interruptions(events: Iterable[Mapping[str, Any]]) -> int:
    """Number of earlier starts of a run that ended in a kill or an error, from its events."""
    count, running = 0, False
    for event in events:
        kind = event.get("kind")
        if kind == "started":
            count += running  # the previous start recorded no end
            running = True
        elif kind in ("finished", "interrupted", "failed"):
            count += kind == "failed"
            running = False
    return count


def save_interval(stall_s: float | None, save_s: float, mtti_s: float) -> float:
    """Seconds between saves. `stall_s` is None before the first save; `save_s` is the full duration of a save."""
    if stall_s is None:
        return FIRST_S
    longest = max(LONGEST_S, stall_s / LARGEST_SHARE)
    # A save must end well before the next begins, even if it blocks the run only briefly.
    return max(SHORTEST_S, 2 * save_s, min(longest, young_daly(stall_s, mtti_s)))


@dataclass(frozen=True)
class Reliability:
    """Failures per node and day, and the seconds that a job needs to continue after one."""

    failures_per_node_day: float = USUAL
    restart_s: float = RESTART_S
    save_stall_s: float = SAVE_STALL_S
    preemptions_per_node_hour: float = 0.0
    requeue_s: float = 0.0  # waiting for other spot machines

    def rate(self, nodes: int) -> float:
        """Interruptions of the job per second: a failure of any node stops all."""
        return nodes * (self.failures_per_node_day / DAY_S + self.preemptions_per_node_hour / 3600)

    def lost_s(self) -> float:
        """Mean seconds per interruption, without the repeated work: failures and preemptions by their frequency."""
        failures, preemptions = self.failures_per_node_day / DAY_S, self.preemptions_per_node_hour / 3600
        if not failures + preemptions:
            return self.restart_s
        return self.restart_s + self.requeue_s * preemptions / (failures + preemptions)


@dataclass(frozen=True)
class Goodput:
    """Where the time of a job goes, as shares that add up to 1."""

    share: float  # training that is not lost
    saves: float
    redone: float  # work since the last save, lost
    restarts: float
    save_every_s: float
    mtti_s: float

    def wall_s(self, work_s: float) -> float:
        return work_s / self.share if self.share > 0 else math.inf

    def interruptions(self, work_s: float) -> float:
        """Expected number in a run with this much work."""
        wall = self.wall_s(work_s)
        return wall / self.mtti_s if math.isfinite(self.mtti_s) else 0.0


def effective_share(rate: float, restart_s: float, save_s: float, every_s: float) -> tuple[float, float, float, float]:
    """Shares of (saved work, saves, lost work, restarts) at `rate` interruptions per second.

    Work proceeds in stretches of dt + w that count once saved. A stretch completes with probability
    exp(-rate (dt + w)). An interruption costs the stretch so far and a restart, which may itself be interrupted.
    """
    stretch = every_s + save_s
    if rate <= 0:
        return every_s / stretch, save_s / stretch, 0.0, 0.0
    if rate * stretch > 500:
        return 0.0, 0.0, 0.0, 1.0
    completes = math.exp(-rate * stretch)
    tries = (1 - completes) / completes  # interrupted stretches for each complete one
    lost = 1 / rate - stretch * completes / (1 - completes)  # mean length of an interrupted one
    restart = (math.exp(min(500.0, rate * restart_s)) - 1) / rate  # until a restart succeeds
    total = stretch + tries * (lost + restart)
    return every_s / total, save_s / total, tries * lost / total, tries * restart / total


def goodput(nodes: int, reliability: Reliability | None = None, save_every_s: float | None = None) -> Goodput:
    """Goodput of a job of `nodes` nodes; saves at the optimal interval unless `save_every_s` is given."""
    reliability = reliability or Reliability()
    if nodes < 1:
        raise UserError(f"nodes: {nodes} is no cluster: write at least 1")
    rate = reliability.rate(nodes)
    mtti = 1 / rate if rate > 0 else math.inf
    stall = reliability.save_stall_s
    every = save_every_s or (young_daly(stall, mtti) if math.isfinite(mtti) else DAY_S)
    every = max(every, 1.0)
    return Goodput(*effective_share(rate, reliability.lost_s(), stall, every), every, mtti)
