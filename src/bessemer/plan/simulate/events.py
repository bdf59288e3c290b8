"""One training step as discrete events: the passes of a pipeline's stages in the order of their schedule, hops between
them over links that also reduce gradients, and what waits for what.

One column is played: the stages that hold one replica, each standing for its group of tensor and context parallelism.
The other columns are statistically alike, so plan/simulate/simulate.py takes the slowest of them from one column's
spread. Durations come from plan/cost_model/step_time.py; without noise the two agree within AGREES.

A whole run as discrete events: stretches of steps between saves, failures and preemptions that throw it back to its
last save, restarts, waits for a node, and slow nodes that hold up all the others.

With even chances and no slow node the mean over many runs is plan/cost_model/goodput.py's formula; what is added here
is the spread, and what no formula holds: spare nodes that run out, saves that are not yet written when a node fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from statistics import NormalDist
from typing import Literal

from bessemer.plan.cost_model.goodput import Reliability
from bessemer.plan.cost_model.step_time import StepSetup, StepTime, step_time
from bessemer.plan.hardware import Cluster

Kind = Literal["forward", "backward", "exchange", "hop", "data", "host", "reduce", "update"]
# Steptime lets a stage pay for every hop on both ways; here the ends of the pipeline have none to pay, and interleaved
# stages meet the head once for all their chunks. With one stage nothing of this exists, and the two are equal.
AGREES = 0.02
MOST_PASSES = 4000  # that are played; longer steps repeat what these did
GATHERED_FORWARD = 0.25  # of what FSDP sends: weights in 2 bytes; backward weights again and gradients in 4


@dataclass(frozen=True)
class PipelinePass:
    """Seconds of one micro-batch in the layers of one stage, one way, by what they go to."""

    compute: float
    exchange: float = 0.0  # collectives inside layers
    data: float = 0.0  # gathering and reducing weights layer by layer, as far as it shows
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.data + self.host


@dataclass(frozen=True)
class Step:
    """`forward` and `backward` are those of one of a process's `virtual` parts. The head comes on top of the last."""

    stages: int
    virtual: int
    batches: int
    forward: PipelinePass
    backward: PipelinePass
    head_s: float = 0.0  # forward and backward
    hop_s: float = 0.0
    reduce_s: float = 0.0  # gradients, after the last backward pass
    update_s: float = 0.0
    host_s: float = 0.0  # once a step

    def times(self, factor: float) -> Step:
        """The same with every part so many times as long."""
        forward, backward = (
            PipelinePass(*(factor * seconds for seconds in astuple(one))) for one in (self.forward, self.backward)
        )
        names = ("head_s", "hop_s", "reduce_s", "update_s", "host_s")
        return replace(self, forward=forward, backward=backward, **{n: factor * getattr(self, n) for n in names})

    @property
    def passes(self) -> int:
        return 2 * self.stages * self.virtual * self.batches


@dataclass(frozen=True)
class Span:
    """What a stage did from when to when; `batch` is the micro-batch, -1 for what belongs to none."""

    stage: int
    start: float
    end: float
    kind: Kind
    batch: int


@dataclass(frozen=True)
class StepTrace:
    """A step that was played. `pipeline_s` ends with the last pass, `total_s` with the update."""

    stages: int
    total_s: float
    pipeline_s: float
    busy_s: float  # in passes, of all stages together
    contended_s: float  # what hops and reductions lost to each other on the links
    spans: tuple[Span, ...]

    @property
    def bubble(self) -> float:
        """Share of the stages' time that they wait for one another, of the time in which passes run."""
        return max(0.0, 1 - self.busy_s / (self.stages * self.pipeline_s))

    @property
    def bubble_of_step(self) -> float:
        return self.bubble * self.pipeline_s / self.total_s


def step_of(setup: StepSetup, cluster: Cluster) -> tuple[Step, StepTime]:
    """The parts of a step, and steptime's own sum of them. What a micro-batch takes is what one more of them adds."""
    known = step_time(setup, cluster)
    more = replace(setup, global_batch=setup.global_batch + setup.micro_batch * setup.layout.dp)
    each = {name: seconds - known.parts[name] for name, seconds in step_time(more, cluster).parts.items()}
    pp, virtual, batches = setup.layout.pp, setup.virtual, setup.micro_batches
    whole = each["compute"] + each["tp"] + each["dp"] + each["stall"]
    # The bubble is made of stages without the head, its loss and its exchanges.
    head = max(0.0, whole - known.bubble_s * virtual / (pp - 1)) if pp > 1 else 0.0
    parts = PipelinePass(
        (each["compute"] - head) / virtual, each["tp"] / virtual, each["dp"] / virtual, each["stall"] / virtual
    )
    again = setup.recompute == "full"
    forward = PipelinePass(
        parts.compute / (4 if again else 3), parts.exchange / (3 if again else 2), parts.data * GATHERED_FORWARD,
        parts.host / 3,
    )  # fmt: skip
    backward = PipelinePass(
        parts.compute - forward.compute, parts.exchange - forward.exchange, parts.data - forward.data,
        parts.host - forward.host,
    )  # fmt: skip
    step = Step(
        pp, virtual, batches, forward, backward,
        head_s=head,
        hop_s=each["pp"] / (2 * virtual),
        reduce_s=max(0.0, known.dp_s - batches * each["dp"]),
        update_s=known.optimizer_s,
        host_s=max(0.0, known.stall_s - batches * each["stall"]),
    )  # fmt: skip
    return step, known


def order(step: Step, stage: int) -> list[tuple[bool, int, int]]:
    """(forward?, part, micro-batch) as a stage runs them: 1F1B (Narayanan et al. 2019), interleaved where a process has
    several parts (Narayanan et al. 2021). Those take turns at as many micro-batches as there are stages; where that
    does not come out even, the last round runs with some of them left out."""
    p, v = step.stages, step.virtual
    rounds = range(0, step.batches, p)
    turns = [(part, first + i) for first in rounds for part in range(v) for i in range(p)]
    ahead = min(len(turns), 2 * (p - stage - 1) + (v - 1) * p if v > 1 else p - stage - 1)
    forward = [(True, part, batch) for part, batch in turns]
    backward = [(False, v - 1 - part, batch) for part, batch in turns]
    steady = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    found = forward[:ahead] + steady + backward[len(forward) - ahead :]
    return [one for one in found if one[2] < step.batches]


def play(
    step: Step, noise: Callable[[], float] | None = None, slow: tuple[int, float] | None = None, record: bool = False
) -> StepTrace:
    """Run the events of a step. `noise` gives a factor for the computing of each pass; `slow` names a stage and how
    much longer its forward computing takes, as a share."""
    return _Player(step, noise, slow, record).run()


class _Player:
    """The state of a step under way: which pass each stage is at, which passes are done, which links are in use."""

    def __init__(
        self, step: Step, noise: Callable[[], float] | None, slow: tuple[int, float] | None, record: bool
    ) -> None:
        self.step, self.noise, self.slow, self.record = step, noise, slow, record
        self.last = step.stages * step.virtual - 1
        self.orders = [order(step, stage) for stage in range(step.stages)]
        self.places, self.busy = [0] * step.stages, [False] * step.stages
        self.reduced_at = [0.0] * step.stages  # when a stage's gradients are, once that has begun
        self.done: set[tuple[bool, int, int]] = set()
        self.events: list[tuple[float, int, bool, int, int]] = []  # ends of passes
        self.spans: list[Span] = []
        self.now = self.worked_s = self.contended_s = 0.0

    def run(self) -> StepTrace:
        step, p = self.step, self.step.stages
        for stage in range(p):
            self.begin(stage)
        while self.events:
            self.now, stage, forward, part, batch = heappop(self.events)
            at = part * p + stage
            self.done.add((forward, at, batch))
            self.busy[stage] = False
            self.begin(stage)
            follower = at + 1 if forward else at - 1
            if 0 <= follower <= self.last and p > 1:
                self.begin(follower % p)
        # Gradients are clipped by their norm over all stages, so all wait for the last reduction.
        updating = max(self.now, *self.reduced_at)
        total = updating + step.update_s + step.host_s
        for stage, reduced in enumerate(self.reduced_at):
            self.note(stage, reduced - step.reduce_s, [("reduce", step.reduce_s)])
            self.note(stage, updating, [("update", step.update_s), ("host", step.host_s)])
        return StepTrace(p, total, self.now, self.worked_s, self.contended_s, tuple(self.spans))

    def begin(self, stage: int) -> None:
        """Start the stage's next pass, if the stage is free and what the pass needs is there."""
        step, place = self.step, self.places[stage]
        if self.busy[stage] or place == len(self.orders[stage]):
            return
        forward, part, batch = self.orders[stage][place]
        at = part * step.stages + stage
        source = at - 1 if forward else at + 1
        inside = 0 <= source <= self.last
        if inside and (forward, source, batch) not in self.done:
            return
        work, factor = (step.forward, 1 / 3) if forward else (step.backward, 2 / 3)
        compute = work.compute + (step.head_s * factor if at == self.last else 0.0)
        compute *= self.noise() if self.noise else 1.0
        if self.slow and forward and stage == self.slow[0]:
            compute *= 1 + self.slow[1]
        hop = self.hop(stage, source % step.stages) if inside and step.stages > 1 else 0.0
        parts: list[tuple[Kind, float]] = [
            ("hop", hop), ("forward" if forward else "backward", compute), ("exchange", work.exchange),
            ("data", work.data), ("host", work.host),
        ]  # fmt: skip
        seconds = hop + compute + work.exchange + work.data + work.host
        self.note(stage, self.now, parts, batch)
        self.worked_s += seconds
        self.busy[stage] = True
        self.places[stage] += 1
        if place + 1 == len(self.orders[stage]):
            self.reduced_at[stage] = self.now + seconds + step.reduce_s
        heappush(self.events, (self.now + seconds, stage, forward, part, batch))

    def hop(self, stage: int, sender: int) -> float:
        """Seconds to receive, before computing, as steptime counts it. A link on which gradients are being reduced
        gives a hop half of itself, and the reduction loses as much."""
        rivals = [one for one in {stage, sender} if self.reduced_at[one] > self.now]
        for one in rivals:
            self.reduced_at[one] += self.step.hop_s
        self.contended_s += self.step.hop_s * len(rivals)
        return self.step.hop_s * (2 if rivals else 1)

    def note(self, stage: int, start: float, parts: list[tuple[Kind, float]], batch: int = -1) -> None:
        if not self.record:
            return
        for kind, seconds in parts:
            if seconds > 0:
                self.spans.append(Span(stage, start, start + seconds, kind, batch))
                start += seconds


def shorter(step: Step, passes: int = MOST_PASSES) -> Step:
    """The same step with fewer micro-batches, at least twice as many as stages: enough to see its rhythm."""
    if step.passes <= passes:
        return step
    round_of = step.stages if step.virtual > 1 else 1
    most = max(2 * step.stages, passes // (2 * step.stages * step.virtual))
    return replace(step, batches=min(step.batches, most // round_of * round_of))


def length(step: Step, slow: tuple[int, float] | None = None) -> float:
    """Seconds of a step without noise. Of a long one the beginning and the end are played, and the rhythm between
    them is continued."""
    few = shorter(step)
    long = play(few, slow=slow).total_s
    if few.batches == step.batches:
        return long
    fewer = replace(few, batches=max(step.stages, few.batches // 2 // step.stages * step.stages))
    rhythm = (long - play(fewer, slow=slow).total_s) / (few.batches - fewer.batches)
    return long + rhythm * (step.batches - few.batches)


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
class FailureRates:
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

    def even(self) -> FailureRates:
        """The same failures, without unevenness, slow nodes or waiting."""
        return replace(self, jitter=0.0, slow_nodes=0.0, rate_spread=0.0, restart_spread=0.0, exchanged=0.0)

    def standing_by(self, nodes: int) -> int:
        """Spare nodes: the mean number under repair and three times its deviation."""
        if self.spares is not None:
            return self.spares
        mean = nodes * self.reliability.failures_per_node_day / 86_400 * self.exchanged * self.repair_s
        return math.ceil(mean + 3 * math.sqrt(mean))


@dataclass(frozen=True)
class SimulatedJob:
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
class SimulatedRun:
    """One run: seconds in all, and those that went to anything but steps that were kept at full speed."""

    wall_s: float
    failures: int = 0
    preemptions: int = 0
    saving_s: float = 0.0
    redone_s: float = 0.0
    restarting_s: float = 0.0
    waiting_s: float = 0.0  # for a node, none standing by
    slow_s: float = 0.0


def play_run(job: SimulatedJob, chances: FailureRates, random: Random, rank: float | None = None) -> SimulatedRun:
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
        return SimulatedRun(math.inf)
    left, now = job.work_s, 0.0
    failures = preemptions = 0
    redone = restarting = waiting = saving = slowed = 0.0
    while now < MOST_S:
        drag = job.drag if pool.slow else 1.0
        saves = max(1, math.ceil(left * drag / every - 1e-9))
        whole = left * drag + saves * stall
        until = _next(rate, random)
        if until >= whole:
            return SimulatedRun(
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
    return SimulatedRun(math.inf, failures, preemptions, saving, redone, restarting, waiting, slowed)


class _Nodes:
    """Which of them are slow, and which are away for repair."""

    def __init__(self, nodes: int, chances: FailureRates, random: Random) -> None:
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
