"""A whole run as discrete events: stretches of steps between saves, failures and preemptions that throw it back to its
last save, restarts, waits for a node, and slow nodes that hold up all the others.

With even chances and no slow node the mean over many runs is plan/goodput.py's formula; what is added here is the
spread, and what no formula holds: spare nodes that run out, saves that are not yet written when a node fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from statistics import NormalDist

from bessemer.plan.goodput import Reliability

# Llama 3 405B, 419 interruptions: 289 were of GPUs and other parts of a node, which has to be exchanged; the others
# (software, switches and cables, maintenance, dependencies) were not.
EXCHANGED = 289 / 419
# MegaScale 2024: about 0.5 % of the machines took some 10 % longer for the same forward computing.
SLOW_NODES, SLOW_BY = 0.005, 0.10
# Llama 3 405B: storage of 2 TB/s sustained, for some 2,000 nodes.
WRITE_BYTES_S = 1e9
NORMAL = NormalDist()
HOPELESS = 10.0  # interruptions that are expected in one restart and one stretch of work: one in 20,000 gets through
MOST_S = 100 * 365 * 86_400.0  # a run that takes longer will not finish


@dataclass(frozen=True)
class Chances:
    """What goes wrong, how often and how unevenly. The spreads are standard deviations of logarithms; means stay."""

    reliability: Reliability = field(default_factory=Reliability)
    jitter: float = 0.01  # of the computing of a pass from one GPU to the next: a guess, nobody publishes it
    slow_nodes: float = SLOW_NODES
    slow_by: float = SLOW_BY
    rate_spread: float = 0.4  # of clusters: nine of ten within 2.5 to 9.4 failures in 1,000 node-days; 2.3 to 6.5 known
    restart_spread: float = 0.5  # a guess: MegaScale's lie under 15 minutes, OLMo Hybrid's at 4, and 39 in the mean
    exchanged: float = EXCHANGED
    repair_s: float = 86_400.0  # until a node that was taken out is back: a guess
    spares: int | None = None  # nodes that stand by; None: enough that a run hardly ever waits
    write_bytes_s: float = WRITE_BYTES_S  # of a node to storage

    def even(self) -> Chances:
        """The same failures, without unevenness, slow nodes or waiting."""
        return replace(self, jitter=0.0, slow_nodes=0.0, rate_spread=0.0, restart_spread=0.0, exchanged=0.0)

    def standing_by(self, nodes: int) -> int:
        """Spare nodes: the mean number under repair and three times its deviation."""
        if self.spares is not None:
            return self.spares
        mean = nodes * self.reliability.failures_per_node_day / 86_400 * self.exchanged * self.repair_s
        return math.ceil(mean + 3 * math.sqrt(mean))


@dataclass(frozen=True)
class Job:
    """A run to be played. `work_s` are its steps without slow nodes and interruptions, `drag` how many times as long
    they take with a slow one. A save holds up the run for the reliability's stall, counts once it is written, and costs
    the steps beside it `writing_s` on the links that they share."""

    nodes: int
    work_s: float
    every_s: float  # of work between saves
    drag: float = 1.0
    write_s: float = 0.0
    writing_s: float = 0.0


@dataclass(frozen=True)
class Played:
    """One run: seconds in all, and those that went to anything but steps that were kept at full speed."""

    wall_s: float
    failures: int = 0
    preemptions: int = 0
    saving_s: float = 0.0
    redone_s: float = 0.0
    restarting_s: float = 0.0
    waiting_s: float = 0.0  # for a node, none standing by
    slow_s: float = 0.0


def play_run(job: Job, chances: Chances, random: Random, rank: float | None = None) -> Played:
    """One run to its end, or to a century, which counts as never. `rank` is that of the cluster among all, from 0 for
    the one that fails least to 1; drawn where it is not given."""
    sure, nodes = chances.reliability, job.nodes
    normal = NORMAL.inv_cdf(rank) if rank is not None else random.gauss(0, 1)
    failing = nodes * sure.failures_per_node_day / 86_400 * _around_one(normal, chances.rate_spread)
    rate = failing + nodes * sure.preemptions_per_node_hour / 3600
    pool = _Nodes(nodes, chances, random)
    stall = sure.save_stall_s + job.writing_s
    every, stretch = job.every_s, job.every_s + stall
    if rate * (stretch + sure.restart_s + sure.requeue_s) > HOPELESS:
        return Played(math.inf)
    left, now = job.work_s, 0.0
    failures = preemptions = 0
    redone = restarting = waiting = saving = slowed = 0.0
    while now < MOST_S:
        drag = job.drag if pool.slow else 1.0
        saves = max(1, math.ceil(left * drag / every - 1e-9))
        whole = left * drag + saves * stall
        until = _next(rate, random)
        if until >= whole:
            return Played(
                now + whole, failures, preemptions, saving + saves * stall, redone, restarting, waiting,
                slowed + left * (drag - 1),
            )  # fmt: skip
        kept = min(int(max(0.0, until - job.write_s) / stretch), saves - 1)
        left -= kept * every / drag
        slowed += kept * every * (1 - 1 / drag)
        saving += kept * stall
        redone += until - kept * stretch
        now += until
        failed = random.random() * rate < failing
        failures, preemptions = failures + failed, preemptions + (not failed)
        wait = pool.exchange(now) if failed else 0.0
        usual = sure.restart_s + (0.0 if failed else sure.requeue_s)
        again = _restart(usual, chances.restart_spread, rate, random)
        waiting, restarting, now = waiting + wait, restarting + again, now + wait + again
    return Played(math.inf, failures, preemptions, saving, redone, restarting, waiting, slowed)


class _Nodes:
    """Which of them are slow, and which are away for repair."""

    def __init__(self, nodes: int, chances: Chances, random: Random) -> None:
        self.nodes, self.chances, self.random = nodes, chances, random
        self.spares = chances.standing_by(nodes)
        self.away: list[float] = []  # when each comes back
        self.slow = 0
        # From one slow node to the next: geometric gaps, so that 12,500 nodes cost as many draws as are slow.
        scale = math.log1p(-chances.slow_nodes) if chances.slow_nodes > 0 else 0.0
        at = self._gap(scale) if scale else nodes
        while at < nodes:
            self.slow += 1
            at += 1 + self._gap(scale)

    def _gap(self, scale: float) -> int:
        return int(math.log(1 - self.random.random()) / scale)

    def exchange(self, now: float) -> float:
        """Seconds until the run is complete again after a failure."""
        chances, random = self.chances, self.random
        if random.random() >= chances.exchanged:
            return 0.0
        self.slow -= random.random() * self.nodes < self.slow
        self.slow += random.random() < chances.slow_nodes
        while self.away and self.away[0] <= now:
            heappop(self.away)
        heappush(self.away, now + chances.repair_s)
        return heappop(self.away) - now if len(self.away) > self.spares else 0.0


def _next(rate: float, random: Random) -> float:
    """Seconds to the next interruption."""
    return -math.log(1 - random.random()) / rate if rate > 0 else math.inf


def _around_one(normal: float, spread: float) -> float:
    """Log-normal with a mean of 1, from a normal draw."""
    return math.exp(spread * (normal - spread / 2)) if spread else 1.0


def _restart(mean_s: float, spread: float, rate: float, random: Random) -> float:
    """Seconds until one restart gets through: it may be interrupted too."""
    spent = 0.0
    while spent < MOST_S:
        needed = mean_s * (_around_one(random.gauss(0, 1), spread) if spread else 1)
        until = _next(rate, random)
        if until >= needed:
            return spent + needed
        spent += until
    return spent
