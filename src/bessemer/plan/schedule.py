"""The learning rate as a closed-form function of the step: no state to save or restore.

A schedule is a warm-up, a course and later segments. Every place that needs a rate (the run, trials, emitted files,
the plot) gets its schedule from `run_schedule`. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bessemer.errors import UserError
from bessemer.spec.quantity import span_steps
from bessemer.spec.schedule import ScheduleSpec

ONE_CYCLE_START = 1 / 25  # of the peak (Smith 2018, as in torch)
EXPONENTIAL_START = 0.01  # of an exponential warm-up
WARMUP_POWER = 2.0  # of a polynomial warm-up

BATCH_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # of the rate in the batch

BatchPhases = tuple[tuple[int, int], ...]  # (from_step, sequences of a step)


def tokens_after(phases: BatchPhases, steps: int) -> int:
    """Sequences read by the first `steps` steps."""
    total = 0
    for i, (start, rows) in enumerate(phases):
        end = phases[i + 1][0] if i + 1 < len(phases) else steps
        total += max(0, min(end, steps) - start) * rows
    return total


def steps_for(phases: BatchPhases, sequences: int) -> int:
    """Steps needed to read that many sequences."""
    done = 0
    for i, (start, rows) in enumerate(phases):
        room = (phases[i + 1][0] - start) * rows if i + 1 < len(phases) else None
        if room is None or done + room >= sequences:
            return max(1, start + -(-(sequences - done) // rows))
        done += room
    raise AssertionError("unreachable: the last phase has no end")


def fall(shape: str, progress: float, power: float = 2.0) -> float:
    """What is left of a decay, from 1 at progress 0 to 0 at progress 1."""
    match shape:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "sqrt":
            return 1 - math.sqrt(progress)
        case "power":
            return float((1 - progress) ** power)
        case _:
            return 1 - progress


def between(start: float, end: float, shape: str, progress: float, power: float = 2.0) -> float:
    """The value on the way from `start` to `end`. Exponential falls by the same factor in each step."""
    if shape == "exponential" and start and end:
        return float(start * (end / start) ** progress)
    return end + (start - end) * fall(shape, progress, power)


def rise(shape: str, progress: float) -> float:
    """The share of the peak in a warm-up, which ends at progress 1."""
    match shape:
        case "cosine":
            return 0.5 * (1 - math.cos(math.pi * progress))
        case "exponential":
            return float(EXPONENTIAL_START ** (1 - progress))
        case "polynomial":
            return float(progress**WARMUP_POWER)
        case _:
            return progress


@dataclass(frozen=True)
class RateSegment:
    """From a step on: from the rate there to `to` (a share of the peak) over `length` steps; None holds the rate."""

    from_step: int
    to: float | None
    length: int
    shape: str = "linear"


@dataclass(frozen=True)
class Schedule:
    """A warm-up to `peak`, then a course to `floor * peak`, which holds past `total` steps; then the segments."""

    peak: float
    warmup: int
    total: int
    kind: str = "cosine"
    floor: float = 0.1
    warmup_shape: str = "linear"
    cycles: int = 1
    power: float = 2.0
    decay: int = 0  # steps at the end, of wsd
    decay_shape: str = "linear"
    every: int = 1  # steps between the drops of `step`
    factor: float = 0.5
    timescale: int = 0  # of inverse_sqrt; 0 is the warm-up
    segments: tuple[RateSegment, ...] = ()
    batches: BatchPhases = ()  # progress counts tokens, if the batch sizes are given
    batch_rule: BatchPhases = ()  # the batch sizes that the rate follows
    batch_power: float = 1.0

    def lr(self, step: int) -> float:
        """The rate of a step, counted from 0: the first one is peak / warmup, never zero."""
        started = [k for k, segment in enumerate(self.segments) if segment.from_step <= step]
        rate = self._in_segment(started[-1], step) if started else self._course(step)
        if not self.batch_rule:
            return rate
        rows = [size for start, size in self.batch_rule if start <= step]
        return rate * float((rows[-1] / rows[0]) ** self.batch_power)

    def changes(self) -> dict[int, str]:
        """Steps at which the rate changes course or rises again, with the reason."""
        steps = {segment.from_step: "the learning-rate schedule changes" for segment in self.segments}
        until = min([self.total, *steps])
        if self.kind == "cosine" and self.cycles > 1:
            starts = (self._first_step(k / self.cycles) for k in range(1, self.cycles))
            steps |= {step: "the learning rate restarts at its peak" for step in starts if step < until}
        return steps

    def _in_segment(self, index: int, step: int) -> float:
        segment = self.segments[index]
        first = segment.from_step
        start = self._in_segment(index - 1, first) if index else self._course(first)
        if segment.to is None:
            return start
        progress = self._progress(step, first, first + max(1, segment.length))
        return between(start, self.peak * segment.to, segment.shape, progress, self.power)

    def _course(self, step: int) -> float:
        if self.kind == "one_cycle":
            return self.peak * self._one_cycle(step)
        if step < self.warmup:
            if self.warmup_shape == "linear":
                return self.peak * self._position(step + 1) / self._position(self.warmup)
            return self.peak * rise(self.warmup_shape, self._position(step + 1) / self._position(self.warmup))
        match self.kind:
            case "constant":
                return self.peak
            case "exponential":
                return self.peak * between(1.0, self.floor, "exponential", self._share(step))
            case "step":
                drops = (step - self.warmup) // max(1, self.every)
                return self.peak * max(self.floor, self.factor**drops)
            case "inverse_sqrt":
                steps = self._position(step) - self._position(self.warmup)
                scale = self._position(self.timescale or max(1, self.warmup))
                return self.peak * max(self.floor, (1 + steps / scale) ** -0.5)
            case "wsd":
                end = self.total - 1
                progress = self._progress(step, max(self.warmup, end - self.decay), end)
                return self.peak * between(1.0, self.floor, self.decay_shape, progress, self.power)
            case _:
                return self.peak * (self.floor + (1 - self.floor) * self._left(self._share(step)))

    def _left(self, share: float) -> float:
        """What is left of the way from the peak to the floor."""
        if self.kind == "cyclical":
            return 1 - abs(2 * math.fmod(share * self.cycles, 1) - 1)
        if self.kind == "cosine" and self.cycles > 1:
            share = math.fmod(share * self.cycles, 1) if share < 1 else 1.0
        return fall({"polynomial": "power"}.get(self.kind, self.kind), share, self.power)

    def _one_cycle(self, step: int) -> float:
        top = max(0, self.warmup - 1)  # the peak
        if step < top:
            return between(ONE_CYCLE_START, 1.0, "cosine", self._progress(step, 0, top))
        return between(1.0, self.floor, "cosine", self._progress(step, top, self.total - 1))

    def _share(self, step: int) -> float:
        return self._progress(step, self.warmup, self.total - 1)

    def _progress(self, step: int, first: int, last: int) -> float:
        """The share of the way from the start of one step to that of another."""
        at, start, end = self._position(step), self._position(first), self._position(last)
        return max(0.0, min(1.0, (at - start) / max(1, end - start)))

    def _position(self, step: int) -> int:
        """Where a step starts: in steps, or in sequences."""
        return tokens_after(self.batches, step) if self.batches else step

    def _first_step(self, share: float) -> int:
        """The first step at or past a share of the course."""
        steps = range(self.warmup, self.total)
        if not self.batches:
            return self.warmup + math.ceil(share * (self.total - 1 - self.warmup) - 1e-9)
        return next((step for step in steps if self._share(step) >= share), self.total)


class DecidedRun(Protocol):
    """What a schedule needs of a plan (`plan/decide.py::TrainPlan`)."""

    @property
    def peak_lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def batch_rows(self) -> BatchPhases: ...
    @property
    def context(self) -> int: ...


def run_schedule(spec: ScheduleSpec, run: DecidedRun) -> Schedule:
    """The schedule of a run, its spans in steps."""

    def steps(span: float | str | None, default: int = 0) -> int:
        if span is None:
            return default
        if isinstance(span, str):  # tokens
            return steps_for(run.batch_rows, -(-int(span.split()[0]) // run.context))
        return max(1, span_steps(span, total, 1))

    total = run.total_steps
    total = steps(spec.length, total)
    settings: dict[str, Any] = spec.settings()
    for key in ("decay", "every", "timescale"):
        if key in settings:
            settings[key] = steps(settings[key])
    if spec.length is not None and run.warmup_steps >= total:
        raise UserError(
            f"schedule.length: {total:,} steps end within the warm-up of {run.warmup_steps:,}: write a longer one"
        )
    ends = [segment.from_step for segment in spec.segments[1:]] + [max(run.total_steps, total) - 1]
    segments = tuple(
        RateSegment(part.from_step, part.to, steps(part.length, end - part.from_step), part.shape)
        for part, end in zip(spec.segments, ends, strict=False)
    )
    return Schedule(
        run.peak_lr, run.warmup_steps, total, spec.kind, spec.floor, spec.warmup_shape, segments=segments,
        batches=run.batch_rows if spec.unit == "tokens" else (),
        batch_rule=run.batch_rows if spec.batch_rule != "none" else (), batch_power=BATCH_POWERS[spec.batch_rule],
        **settings,
    )  # fmt: skip


@dataclass(frozen=True)
class ScheduleSketch:
    """A run as far as a spec alone decides it. Satisfies `DecidedRun`."""

    peak_lr: float
    warmup_steps: int
    total_steps: int
    batch_rows: BatchPhases
    context: int


def curve(schedule: Schedule, steps: int, points: int = 400) -> tuple[Sequence[int], list[float]]:
    """Steps, the last one among them, and their rates, for a plot."""
    chosen = sorted({*range(0, steps, max(1, steps // points)), steps - 1})
    return chosen, [schedule.lr(step) for step in chosen]
