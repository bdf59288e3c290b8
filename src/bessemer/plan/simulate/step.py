"""Simulates one training step: the passes of all pipeline stages in schedule order, sends between stages over links
that also reduce gradients, and the waits between them. Draws the timeline of a step as text and as SVG.

One column is simulated: the stages of one replica, each standing for its tensor- and context-parallel group. The other
columns behave alike statistically, so the slowest of them follows from the spread of one column. Durations come from
cost_model/step_time.py; without noise the two agree within AGREES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from heapq import heappop, heappush
from random import Random
from statistics import NormalDist, fmean, pstdev
from typing import Literal

from bessemer.observe.figure import IDLE, SpanStyle, Timeline
from bessemer.plan.cost_model.operators import step_work
from bessemer.plan.cost_model.step_time import StepSetup, StepTime, step_time
from bessemer.plan.hardware import Cluster
from bessemer.plan.search.proposal import Proposal

Kind = Literal["forward", "backward", "exchange", "hop", "data", "host", "reduce", "update"]
# step_time counts every send in both directions; here the ends of the pipeline send in one, and interleaved stages run
# the head once for all their chunks. With one stage the two are equal.
AGREES = 0.02
MOST_PASSES = 4000  # that are simulated; longer steps repeat their per_batch
COLUMN_PASSES, COLUMN_PLAYS = 1500, 200  # of the noisy columns
PICTURE_PASSES = 1200
NORMAL = NormalDist()
GATHERED_FORWARD = 0.25  # of FSDP's traffic: weights in 2 bytes; backward weights again and gradients in 4
STYLES: dict[str, SpanStyle] = {
    "forward": SpanStyle("F", "#2d7dc4", "forward"),
    "backward": SpanStyle("B", "#1b4f7d", "backward"),
    "exchange": SpanStyle("x", "#c4622d", "exchanges inside layers"),
    "hop": SpanStyle("h", "#e0a458", "between stages"),
    "host": SpanStyle("-", "#777777", "host"),
    "reduce": SpanStyle("g", "#9b59b6", "weights and gradients"),
    "update": SpanStyle("u", "#3f9d5c", "update"),
    IDLE: SpanStyle(".", "#e6e6e6", "waiting"),
}


@dataclass(frozen=True)
class PipelinePass:
    """Seconds of the forward or backward pass of one micro-batch through one stage, by part."""

    compute: float
    exchange: float = 0.0  # collectives inside layers
    data: float = 0.0  # exposed gathering and reducing of weights layer by layer
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.data + self.host


@dataclass(frozen=True)
class Step:
    """A step to simulate. `forward` and `backward` are passes through one of a process's `virtual` chunks. The head is
    added to the last one."""

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

    def scale(self, factor: float) -> Step:
        """The same step with every part `factor` times as long."""
        forward, backward = (
            PipelinePass(*(factor * seconds for seconds in astuple(work))) for work in (self.forward, self.backward)
        )
        names = ("head_s", "hop_s", "reduce_s", "update_s", "host_s")
        return replace(self, forward=forward, backward=backward, **{n: factor * getattr(self, n) for n in names})

    @property
    def passes(self) -> int:
        return 2 * self.stages * self.virtual * self.batches


@dataclass(frozen=True)
class Span:
    """One activity of a stage. `batch` is the micro-batch, -1 if it belongs to none."""

    stage: int
    start: float
    end: float
    kind: Kind
    batch: int


@dataclass(frozen=True)
class StepTrace:
    """A simulated step. `pipeline_s` ends with the last pass, `total_s` with the update."""

    stages: int
    total_s: float
    pipeline_s: float
    busy_s: float  # in passes, summed over stages
    contended_s: float  # lost by sends and reductions that share links
    spans: tuple[Span, ...]

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which stages wait for one another."""
        return max(0.0, 1 - self.busy_s / (self.stages * self.pipeline_s))


def split_step(setup: StepSetup, cluster: Cluster) -> tuple[Step, StepTime]:
    """The parts of a step and its predicted time. A micro-batch takes what one more micro-batch adds."""
    predicted = step_time(setup, cluster)
    more = replace(setup, global_batch=setup.global_batch + setup.micro_batch * setup.layout.dp)
    each = {name: seconds - predicted.parts[name] for name, seconds in step_time(more, cluster).parts.items()}
    pp, virtual, batches = setup.layout.pp, setup.virtual, setup.micro_batches
    micro_batch_s = each["compute"] + each["tp"] + each["dp"] + each["stall"]
    # The bubble counts stages without the head.
    head = max(0.0, micro_batch_s - predicted.bubble_s * virtual / (pp - 1)) if pp > 1 else 0.0
    parts = PipelinePass(
        (each["compute"] - head) / virtual, each["tp"] / virtual, each["dp"] / virtual, each["stall"] / virtual
    )
    full = setup.recompute == "full"
    forward = PipelinePass(
        parts.compute / (4 if full else 3), parts.exchange / (3 if full else 2), parts.data * GATHERED_FORWARD,
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
        reduce_s=max(0.0, predicted.dp_s - batches * each["dp"]),
        update_s=predicted.optimizer_s,
        host_s=max(0.0, predicted.stall_s - batches * each["stall"]),
    )  # fmt: skip
    return step, predicted


def pass_order(step: Step, stage: int) -> list[tuple[bool, int, int]]:
    """(is_forward, chunk, micro-batch) in the order of a stage: 1F1B (Narayanan et al. 2019), interleaved if a process
    has several chunks (Narayanan et al. 2021). Chunks take turns in rounds of as many micro-batches as stages; the last
    round may be incomplete."""
    p, v = step.stages, step.virtual
    rounds = range(0, step.batches, p)
    turns = [(part, first + i) for first in rounds for part in range(v) for i in range(p)]
    ahead = min(len(turns), 2 * (p - stage - 1) + (v - 1) * p if v > 1 else p - stage - 1)
    forward = [(True, part, batch) for part, batch in turns]
    backward = [(False, v - 1 - part, batch) for part, batch in turns]
    steady = [item for pair in zip(forward[ahead:], backward, strict=False) for item in pair]
    passes = forward[:ahead] + steady + backward[len(forward) - ahead :]
    return [item for item in passes if item[2] < step.batches]


def simulate_step(
    step: Step, noise: Callable[[], float] | None = None, slow: tuple[int, float] | None = None, record: bool = False
) -> StepTrace:
    """Run the events of a step. `noise` returns a factor for the compute of each pass. `slow` is a stage and the share
    by which its forward compute takes longer."""
    return _StepSimulator(step, noise, slow, record).run()


class _StepSimulator:
    """The state of a running step: the next pass of each stage, completed passes, and links in use."""

    def __init__(
        self, step: Step, noise: Callable[[], float] | None, slow: tuple[int, float] | None, record: bool
    ) -> None:
        self.step, self.noise, self.slow, self.record = step, noise, slow, record
        self.last = step.stages * step.virtual - 1
        self.orders = [pass_order(step, stage) for stage in range(step.stages)]
        self.places, self.busy = [0] * step.stages, [False] * step.stages
        self.reduced_at = [0.0] * step.stages  # end of a stage's gradient reduction, once it has begun
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
        # Clipping needs the gradient norm of all stages, so all wait for the last reduction.
        update_start = max(self.now, *self.reduced_at)
        total = update_start + step.update_s + step.host_s
        for stage, reduced in enumerate(self.reduced_at):
            self.record_spans(stage, reduced - step.reduce_s, [("reduce", step.reduce_s)])
            self.record_spans(stage, update_start, [("update", step.update_s), ("host", step.host_s)])
        return StepTrace(p, total, self.now, self.worked_s, self.contended_s, tuple(self.spans))

    def begin(self, stage: int) -> None:
        """Start the stage's next pass if the stage is free and the inputs are ready."""
        step, place = self.step, self.places[stage]
        if self.busy[stage] or place == len(self.orders[stage]):
            return
        forward, part, batch = self.orders[stage][place]
        at = part * step.stages + stage
        source = at - 1 if forward else at + 1
        receives = 0 <= source <= self.last
        if receives and (forward, source, batch) not in self.done:
            return
        work, factor = (step.forward, 1 / 3) if forward else (step.backward, 2 / 3)
        compute = work.compute + (step.head_s * factor if at == self.last else 0.0)
        compute *= self.noise() if self.noise else 1.0
        if self.slow and forward and stage == self.slow[0]:
            compute *= 1 + self.slow[1]
        hop = self.hop(stage, source % step.stages) if receives and step.stages > 1 else 0.0
        parts: list[tuple[Kind, float]] = [
            ("hop", hop), ("forward" if forward else "backward", compute), ("exchange", work.exchange),
            ("data", work.data), ("host", work.host),
        ]  # fmt: skip
        seconds = hop + compute + work.exchange + work.data + work.host
        self.record_spans(stage, self.now, parts, batch)
        self.worked_s += seconds
        self.busy[stage] = True
        self.places[stage] += 1
        if place + 1 == len(self.orders[stage]):
            self.reduced_at[stage] = self.now + seconds + step.reduce_s
        heappush(self.events, (self.now + seconds, stage, forward, part, batch))

    def hop(self, stage: int, sender: int) -> float:
        """Seconds to receive the input of a pass. A gradient reduction on the same link halves its bandwidth, and is
        delayed by as much."""
        rivals = [peer for peer in {stage, sender} if self.reduced_at[peer] > self.now]
        for peer in rivals:
            self.reduced_at[peer] += self.step.hop_s
        self.contended_s += self.step.hop_s * len(rivals)
        return self.step.hop_s * (2 if rivals else 1)

    def record_spans(self, stage: int, start: float, parts: list[tuple[Kind, float]], batch: int = -1) -> None:
        if not self.record:
            return
        for kind, seconds in parts:
            if seconds > 0:
                self.spans.append(Span(stage, start, start + seconds, kind, batch))
                start += seconds


def shorten(step: Step, passes: int = MOST_PASSES) -> Step:
    """The same step with fewer micro-batches, but at least twice as many as stages."""
    if step.passes <= passes:
        return step
    round_of = step.stages if step.virtual > 1 else 1
    most = max(2 * step.stages, passes // (2 * step.stages * step.virtual))
    return replace(step, batches=min(step.batches, most // round_of * round_of))


def step_seconds(step: Step, slow: tuple[int, float] | None = None) -> float:
    """Seconds of a step without noise. A long step is extrapolated from two shorter ones."""
    few = shorten(step)
    long = simulate_step(few, slow=slow).total_s
    if few.batches == step.batches:
        return long
    fewer = replace(few, batches=max(step.stages, few.batches // 2 // step.stages * step.stages))
    per_batch = (long - simulate_step(fewer, slow=slow).total_s) / (few.batches - fewer.batches)
    return long + per_batch * (step.batches - few.batches)


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step: predicted, simulated without noise, of the slowest column, and of that with a slow node.
    `trace` is for the picture and may have fewer micro-batches."""

    step: Step
    columns: int
    peers: int  # GPUs that synchronize after every pass
    planned_s: float
    events_s: float
    slowest_s: float
    slow_node_s: float
    shares: dict[str, float]  # of `events_s`, averaged over stages
    trace: StepTrace
    shown: int  # micro-batches of the trace


def best_setup(proposal: Proposal) -> StepSetup:
    """The best configuration of the search."""
    goal, best = proposal.goal, proposal.best
    return StepSetup(
        step_work(goal.shape), best.layout, best.micro_rows, best.padded_rows, goal.context, goal.precision,
        best.activations, virtual=best.virtual, sequence_parallel=best.layout.tp > 1,
    )  # fmt: skip


def planned_step(proposal: Proposal, network: float = 1.0) -> Step:
    """The plan's step in parts, with `network` times the bandwidth. Corrections by earlier runs scale every part."""
    setup, cluster = best_setup(proposal), proposal.goal.cluster
    step, predicted = split_step(setup, cluster)
    factor = proposal.best.time.total_s / predicted.total_s
    if network != 1.0:
        step, _ = split_step(setup, replace(cluster, network_bandwidth=cluster.network_bandwidth * network))
    return step.scale(factor)


def simulate_planned_step(proposal: Proposal, jitter: float, slow_by: float, seed: int = 0) -> SimulatedStep:
    """The plan's step without noise, of the slowest column, with a slow node, and as a trace."""
    step = planned_step(proposal)
    layout = proposal.best.layout
    # Shards without a pipeline gather every layer together, so they synchronize every pass; replicas once per step.
    together = layout.dp_shard if layout.pp == 1 else 1
    peers = layout.tp * layout.cp * together
    columns = layout.dp // together
    quiet = step_seconds(step)
    slowest = quiet * slowest_factor(step, columns, peers, jitter, seed)
    # The worst place for a slow node: the last stage also runs the head and has no slack.
    drag = step_seconds(step, (step.stages - 1, slow_by)) / quiet
    few = shorten(step, PICTURE_PASSES)
    trace = simulate_step(few, record=True)
    shares = _time_shares(step, few, trace, quiet)
    return SimulatedStep(
        step, columns, peers, proposal.best.time.total_s, quiet, slowest, slowest * drag, shares, trace, few.batches
    )  # fmt: skip


def slowest_factor(step: Step, columns: int, peers: int, jitter: float, seed: int = 0) -> float:
    """The factor by which a step takes longer if the compute of every GPU and pass varies by `jitter`. Each pass waits
    for the slowest of `peers`, the step for the slowest of `columns`. Mean and spread of one column give the mean of
    the largest of many (Blom 1958, normal order statistics)."""
    if jitter <= 0:
        return 1.0
    random = Random(seed)

    def noise() -> float:
        draw = random.random() or 0.5
        return max(0.0, 1 + jitter * NORMAL.inv_cdf(min(draw ** (1 / peers), 1 - 1e-12)))

    few = shorten(step, COLUMN_PASSES)
    plays = max(6, min(COLUMN_PLAYS, 10 * COLUMN_PASSES // few.passes))
    seconds = [simulate_step(few, noise).total_s for _ in range(plays)]
    # The spread of a sum grows with the square root of its length.
    spread = pstdev(seconds) * math.sqrt(few.batches / step.batches)
    furthest = NORMAL.inv_cdf((columns - 0.375) / (columns + 0.25))
    return (fmean(seconds) + spread * furthest) / simulate_step(few).total_s


def _time_shares(step: Step, few: Step, trace: StepTrace, seconds: float) -> dict[str, float]:
    """Shares of a step's time, from the spans of one with fewer micro-batches."""
    groups: dict[str, tuple[Kind, ...]] = {
        "compute": ("forward", "backward", "update"), "exchanges": ("exchange",), "hops": ("hop",),
        "weights and gradients": ("data", "reduce"), "host": ("host",),
    }  # fmt: skip
    sums = dict.fromkeys(groups, 0.0)
    for span in trace.spans:
        weight = step.batches / few.batches if span.batch >= 0 else 1.0
        name = next(name for name, kinds in groups.items() if span.kind in kinds)
        sums[name] += weight * (span.end - span.start) / (step.stages * seconds)
    return {**sums, "bubble": max(0.0, 1 - sum(sums.values()))}


def timeline(trace: StepTrace, title: str = "", caption: str = "", most: int = 32) -> Timeline:
    """One row for each stage; of more than `most` stages an even selection with the first and the last."""
    stages: Iterable[int] = range(trace.stages)
    if trace.stages > most:
        stages = sorted({round(i * (trace.stages - 1) / (most - 1)) for i in range(most)})
    rows: dict[int, list[tuple[float, float, str]]] = {stage: [] for stage in stages}
    for span in trace.spans:
        if span.stage in rows:
            kind = "reduce" if span.kind == "data" else span.kind
            rows[span.stage].append((span.start, span.end, kind))
    return Timeline(title, caption, {f"stage {stage}": spans for stage, spans in rows.items()}, trace.total_s, STYLES)


def timeline_lines(trace: StepTrace, simulated: int, total: int, cells: int = 96, most: int = 8) -> list[str]:
    """A line of letters for each stage. `simulated` of `total` micro-batches are in the trace."""
    *rows, legend = timeline(trace, most=most).text(cells)
    return [*rows, legend + (f"; {simulated} of {total} micro-batches drawn" if simulated < total else "")]
