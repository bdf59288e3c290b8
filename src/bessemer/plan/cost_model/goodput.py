"""How often to save: Young's and Daly's optimum between time lost to saves and work lost to failures.

`auto` starts from published failure rates and moves to what the run itself meets: the measured stall of its saves and
its own interruptions.

How much of the time a run really trains: failures, restarts, saves, and preemptions of spot machines.

The expected effective time is that of Kokolis et al. 2025 (Revisiting reliability, HPCA): with N nodes that fail r
times a day, restarts of u0, saves of w every dt,   E[ETTR] = (1 - N r (u0 + dt / 2)) / (1 + w / dt).
It counts failures to first order, and holds while little time is lost; `effective_share` follows a run through renewals
instead, equals it there, and stays between 0 and 1 where machines fail faster than they restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.errors import UserError

DAY_S = 86_400.0
# Published clusters report 4 to 6.5 failures in 1,000 node-days; this is the middle, held as one failure's worth.
PRIOR_FAILURES = 1.0
PRIOR_NODE_DAYS = 1000 / 5.25
FIRST_S = 600.0  # until a save was measured
SHORTEST_S = 30.0
LONGEST_S = 1800.0  # machines under desks fail more often than those of the reports
LARGEST_SHARE = 0.005  # of the time, where LONGEST_S would ask for more than the optimum does


def young_daly(stall_s: float, mtti_s: float) -> float:
    """Seconds of work between saves that lose the least time in all: Daly's higher-order form (2006, eq. 37).

    `stall_s` is how long a save holds up the run, `mtti_s` the mean time to an interruption of the whole job.
    """
    if stall_s >= 2 * mtti_s:
        return mtti_s
    ratio = stall_s / (2 * mtti_s)
    return math.sqrt(2 * stall_s * mtti_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def mean_time_to_interruption(nodes: int, failures: int, observed_s: float) -> float:
    """Seconds, for a job of `nodes` nodes that met `failures` in `observed_s`: the prior weighed with what was seen."""
    node_days = PRIOR_NODE_DAYS + nodes * observed_s / DAY_S
    return node_days / (PRIOR_FAILURES + failures) * DAY_S / nodes


def interruptions(events: Iterable[Mapping[str, Any]]) -> int:
    """Starts of a run that ended in a kill or a fault, from its events. The present start is not one of them."""
    count, running = 0, False
    for event in events:
        kind = event.get("kind")
        if kind == "started":
            count += running  # the start before has left no last word
            running = True
        elif kind in ("finished", "interrupted", "failed"):
            count += kind == "failed"
            running = False
    return count


def save_interval(stall_s: float | None, save_s: float, mtti_s: float) -> float:
    """Seconds between saves. `stall_s` is None before the first; `save_s` is how long a save takes in all."""
    if stall_s is None:
        return FIRST_S
    longest = max(LONGEST_S, stall_s / LARGEST_SHARE)
    # A save must be over well before the next begins, however little of it is a stall.
    return max(SHORTEST_S, 2 * save_s, min(longest, young_daly(stall_s, mtti_s)))


KOKOLIS = "Kokolis et al. 2025, E[ETTR]"
# Failures of one node of 8 GPUs in a day.
RSC_1, RSC_2 = 6.50e-3, 2.34e-3  # Kokolis et al. 2025
LLAMA_3 = 419 / (16_384 / 8 * 54)  # Llama 3 405B: 419 unexpected interruptions in 54 days
USUAL = 5.25e-3  # the middle of the published 4 to 6.5, as plan/cost_model/goodput.py has it
RESTART_S = 600.0  # MegaScale 2024: found in under 10 minutes; restart and catch-up under 15
SAVE_STALL_S = 10.0  # asynchronous saves hold up a run for the copy alone


@dataclass(frozen=True)
class Reliability:
    """What happens to a job: failures of a node in a day, and seconds to be back at work after one."""

    failures_per_node_day: float = USUAL
    restart_s: float = RESTART_S
    save_stall_s: float = SAVE_STALL_S
    preemptions_per_node_hour: float = 0.0
    requeue_s: float = 0.0  # waiting for other spot machines
    source: str = "published clusters: 4 to 6.5 failures in 1,000 node-days"

    def rate(self, nodes: int) -> float:
        """Interruptions of the whole job in a second: any node's stops all."""
        return nodes * (self.failures_per_node_day / DAY_S + self.preemptions_per_node_hour / 3600)

    def lost_s(self) -> float:
        """Seconds of one interruption, the work done again not counted: those of failures and preemptions weighed."""
        failures, preemptions = self.failures_per_node_day / DAY_S, self.preemptions_per_node_hour / 3600
        if not failures + preemptions:
            return self.restart_s
        return self.restart_s + self.requeue_s * preemptions / (failures + preemptions)


@dataclass(frozen=True)
class Goodput:
    """Where the time of a job goes, as shares that add up to 1."""

    share: float  # trains, and is kept
    saves: float
    redone: float  # work since the last save, lost
    restarts: float
    save_every_s: float
    mtti_s: float

    def wall_s(self, work_s: float) -> float:
        return work_s / self.share if self.share > 0 else math.inf

    def interruptions(self, work_s: float) -> float:
        """Expected in a run of so much work."""
        wall = self.wall_s(work_s)
        return wall / self.mtti_s if math.isfinite(self.mtti_s) else 0.0


def mtti_s(nodes: int, failures_per_node_day: float) -> float:
    """Mean seconds between interruptions of a job of so many nodes."""
    if nodes < 1:
        raise UserError(f"nodes: {nodes} is no cluster: write at least 1")
    return DAY_S / (nodes * failures_per_node_day) if failures_per_node_day > 0 else math.inf


def young(save_s: float, mtti: float) -> float:
    """Young 1974: seconds between saves, sqrt(2 delta M)."""
    return math.sqrt(2 * save_s * mtti)


def ettr(nodes: int, failures_per_node_day: float, restart_s: float, save_s: float, every_s: float) -> float:
    """The formula of Kokolis et al., to first order; 0 where it would fall below."""
    lost = nodes * failures_per_node_day / DAY_S * (restart_s + every_s / 2)
    return max(0.0, (1 - lost) / (1 + save_s / every_s))


def effective_share(rate: float, restart_s: float, save_s: float, every_s: float) -> tuple[float, float, float, float]:
    """(kept work, saves, work lost, restarts) as shares, for interruptions at `rate` a second in any of it.

    Work goes on in stretches of dt + w that count once saved. A stretch ends whole with chance exp(-rate (dt + w)); an
    interruption costs the stretch so far and a restart, which may itself be interrupted.
    """
    stretch = every_s + save_s
    if rate <= 0:
        return every_s / stretch, save_s / stretch, 0.0, 0.0
    if rate * stretch > 500:
        return 0.0, 0.0, 0.0, 1.0
    whole = math.exp(-rate * stretch)
    tries = (1 - whole) / whole  # interrupted stretches for each whole one
    lost = 1 / rate - stretch * whole / (1 - whole)  # mean length of an interrupted one
    restart = (math.exp(min(500.0, rate * restart_s)) - 1) / rate  # until one restart gets through
    total = stretch + tries * (lost + restart)
    return every_s / total, save_s / total, tries * lost / total, tries * restart / total


def goodput(nodes: int, reliability: Reliability | None = None, save_every_s: float | None = None) -> Goodput:
    """Shares of the time for a job of `nodes`; saves as often as Young and Daly ask, unless told."""
    reliability = reliability or Reliability()
    if nodes < 1:
        raise UserError(f"nodes: {nodes} is no cluster: write at least 1")
    rate = reliability.rate(nodes)
    mtti = 1 / rate if rate > 0 else math.inf
    stall = reliability.save_stall_s
    every = save_every_s or (young_daly(stall, mtti) if math.isfinite(mtti) else DAY_S)
    every = max(every, 1.0)
    kept, saves, lost, restarts = effective_share(rate, reliability.lost_s(), stall, every)
    return Goodput(kept, saves, lost, restarts, every, mtti)


def spot_break_even(nodes: int, reliability: Reliability, on_demand_usd: float, spot_usd: float) -> float:
    """Cost of an hour of kept work on spot over the same on demand: below 1 spot is cheaper, preemptions counted."""
    steady = Reliability(
        reliability.failures_per_node_day, reliability.restart_s, reliability.save_stall_s, source=reliability.source
    )
    on_spot, on_demand = goodput(nodes, reliability).share, goodput(nodes, steady).share
    return math.inf if on_spot <= 0 else spot_usd / on_spot / (on_demand_usd / on_demand)
