"""One training step as discrete events: the passes of a pipeline's stages in the order of their schedule, hops between
them over links that also reduce gradients, and what waits for what.

One column is played: the stages that hold one replica, each standing for its group of tensor and context parallelism.
The other columns are statistically alike, so plan/simulate.py takes the slowest of them from one column's spread.
Durations come from plan/steptime.py; without noise the two agree within AGREES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from bessemer.plan.hardware import Cluster
from bessemer.plan.steptime import Setup, StepTime, step_time

Kind = Literal["forward", "backward", "exchange", "hop", "data", "host", "reduce", "update"]
# Steptime lets a stage pay for every hop on both ways; here the ends of the pipeline have none to pay, and interleaved
# stages meet the head once for all their chunks. With one stage nothing of this exists, and the two are equal.
AGREES = 0.02
MOST_PASSES = 4000  # that are played; longer steps repeat what these did
GATHERED_FORWARD = 0.25  # of what FSDP sends: weights in 2 bytes; backward weights again and gradients in 4


@dataclass(frozen=True)
class Pass:
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
    forward: Pass
    backward: Pass
    head_s: float = 0.0  # forward and backward
    hop_s: float = 0.0
    reduce_s: float = 0.0  # gradients, after the last backward pass
    update_s: float = 0.0
    host_s: float = 0.0  # once a step

    def times(self, factor: float) -> Step:
        """The same with every part so many times as long."""
        forward, backward = (
            Pass(*(factor * seconds for seconds in astuple(one))) for one in (self.forward, self.backward)
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
class Trace:
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


def step_of(setup: Setup, cluster: Cluster) -> tuple[Step, StepTime]:
    """The parts of a step, and steptime's own sum of them. What a micro-batch takes is what one more of them adds."""
    known = step_time(setup, cluster)
    more = replace(setup, global_batch=setup.global_batch + setup.micro_batch * setup.layout.dp)
    each = {name: seconds - known.parts[name] for name, seconds in step_time(more, cluster).parts.items()}
    pp, virtual, batches = setup.layout.pp, setup.virtual, setup.micro_batches
    whole = each["compute"] + each["tp"] + each["dp"] + each["stall"]
    # The bubble is made of stages without the head, its loss and its exchanges.
    head = max(0.0, whole - known.bubble_s * virtual / (pp - 1)) if pp > 1 else 0.0
    parts = Pass(
        (each["compute"] - head) / virtual, each["tp"] / virtual, each["dp"] / virtual, each["stall"] / virtual
    )
    again = setup.recompute == "full"
    forward = Pass(
        parts.compute / (4 if again else 3), parts.exchange / (3 if again else 2), parts.data * GATHERED_FORWARD,
        parts.host / 3,
    )  # fmt: skip
    backward = Pass(
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
) -> Trace:
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

    def run(self) -> Trace:
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
        return Trace(p, total, self.now, self.worked_s, self.contended_s, tuple(self.spans))

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
