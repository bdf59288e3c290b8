"""Job: one run, ready to train. Its parts are the engine that computes, the data, the guard and the recorder.

The loop in `loop.py` works on a Job; functions that need only one part take that part.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from bessemer.data.stream.batches import Batch
from bessemer.dtensor import local
from bessemer.guard.alarm import Alarm
from bessemer.guard.detectors import Detectors
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder, RecoveryCheck
from bessemer.guard.layer_stats import LayerStats
from bessemer.guard.replica_check import ReplicaCheck, digest
from bessemer.guard.watchdog import PhaseTracker, StepPace, Watchdog
from bessemer.parallel.world import World
from bessemer.plan.decide import Interval, TrainPlan
from bessemer.run.control import ControlRequest, RequestReader
from bessemer.run.directory import RunWriter
from bessemer.spec.schema import RunSpec
from bessemer.train.engine import Engine
from bessemer.train.evaluate import Evaluator
from bessemer.train.frozen import frozen_names
from bessemer.train.memory.snapshots import MemorySnapshots

if TYPE_CHECKING:
    from bessemer.train.saver import CheckpointSaver


class View(Protocol):
    """Shows a run: a terminal, a log."""

    def step(self, record: dict[str, Any]) -> None: ...
    def validation(self, record: dict[str, Any]) -> None: ...
    def event(self, record: dict[str, Any]) -> None: ...

    def micro_batch(self, step: int, done: int, total: int, tokens: int) -> None:
        """`done` of the step's micro-batches are queued on the device; 0 when the step begins. `tokens` are those of
        the whole step. Called for each micro-batch, so it must cost nothing."""
        ...

    def activity(self, what: str, done: int = 0, total: int = 0) -> None:
        """Work between steps, such as saving."""
        ...


class Faults(Protocol):
    """Injects faults for `bessemer chaos`. Called where such faults happen in practice."""

    def before_step(self, job: Job, step: int) -> None:
        """Before the forward pass: weights, layers, the process itself."""
        ...

    def after_backward(self, job: Job, step: int) -> None:
        """After the last backward pass, before the gradient norm is computed."""
        ...

    def lr(self, step: int, planned: float) -> float:
        """The learning rate that the update really uses."""
        ...


class Rollouts(Protocol):
    """Makes the data of a run that trains on its own answers."""

    def begins_round(self, job: Job, step: int) -> bool:
        """Whether answers have to be sampled, or read, before a step."""
        ...

    def begin_round(self, job: Job, step: int) -> str | None:
        """Provide the rollouts of a step, with the present weights; the reason if the run ends instead."""
        ...

    def settle(self, job: Job) -> None:
        """Before a checkpoint: what a resumed run needs of unfinished work is on disk."""
        ...

    def stop(self) -> None:
        """End unfinished work: the loop is left for good."""
        ...

    def numbers(self, step: int) -> dict[str, float]:
        """What a step's record says about its rollouts."""
        ...


class TaskScores(Protocol):
    """What a run is scored on besides its held-out loss."""

    def score(self, job: Job, done: int) -> dict[str, Any]:
        """The scores after `done` steps, by task. Changes nothing of the run; a collective call."""
        ...


class RankReadings(Protocol):
    """The newest readings of the machine; see `readings.py`."""

    def of_rank(self) -> list[float]:
        """What this rank tells the others."""
        ...

    def alarms(self, step: int, ranks: dict[str, list[Any]] | None, now_s: float) -> list[Alarm]:
        """On rank 0: alarms about the readings of all ranks."""
        ...


class Profiler(Protocol):
    """Measures where the time of a step goes; see `profile.py`."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """A named range around a part of a step."""
        ...

    def step(self, interrupt: Interrupt) -> None:
        """After a step."""
        ...


@dataclass(frozen=True)
class Adjustment:
    """Temporary factors on the learning rate and on the clipping limit after a rollback."""

    from_step: int
    until_step: int
    lr_scale: float
    clip_scale: float


@dataclass
class Progress:
    """Counters over all starts of the run; saved with every checkpoint."""

    tokens: int = 0
    elapsed_s: float = 0.0
    vetoes: int = 0
    clipped: int = 0
    best_validation: float | None = None
    best_score: list[float] | None = None  # of the best validation: score and loss, lower is better
    last_score: float | None = None
    evaluations_since_best: int = 0
    rollbacks: int = 0
    trial_s: float = 0.0
    first_validation: dict[str, float] = field(default_factory=dict)  # loss by source, before the first step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Interrupt:
    """Set by a signal handler. The loop abandons the step between two micro-batches if it can, otherwise finishes it;
    then it saves and returns."""

    signal: str | None = None


class Abandoned(Exception):
    """A signal ended a step or an evaluation between two micro-batches."""


@dataclass
class Clock:
    """Tells when an interval, in steps or seconds, is due."""

    interval: Interval
    last_s: float = field(default_factory=time.monotonic)

    def due(self, done: int, hurry: int = 1, seconds: float | None = None) -> bool:
        """After `done` steps; `hurry` times as often as usual; `seconds` replaces the interval's own."""
        seconds = seconds or self.interval.seconds
        return self.due_by_steps(done, hurry) or (
            seconds is not None and (time.monotonic() - self.last_s) * hurry >= seconds
        )

    def due_by_steps(self, done: int, hurry: int = 1) -> bool:
        """Whether the number of steps makes it due, which is the same at every start."""
        return self.interval.steps is not None and done % max(1, self.interval.steps // hurry) == 0

    def both_due(self, done: int) -> bool:
        """Whether both the steps and the seconds have passed, for work that must stay cheap in fast and slow runs."""
        steps, seconds = self.interval.steps, self.interval.seconds
        return done % (steps or 1) == 0 and time.monotonic() - self.last_s >= (seconds or 0.0)

    def reset(self) -> None:
        self.last_s = time.monotonic()


@dataclass
class DataFeed:
    """Training batches, the held-out evaluation, and the tokenizer's `decode`."""

    stream: Any  # BatchStream, IterableStream or RolloutStream
    evaluator: Evaluator
    decode: Callable[[list[int]], str]
    tasks: TaskScores | None = None


@dataclass
class Guard:
    """Everything that watches a run and remembers what it did about incidents."""

    judge: Judge
    detectors: Detectors
    layer_stats: LayerStats
    ladder: Ladder
    phase_tracker: PhaseTracker = field(default_factory=PhaseTracker)
    snapshots: MemorySnapshots | None = None
    watchdog: Watchdog | None = None
    step_pace: StepPace | None = None  # with several ranks, as is `replica_check`
    replica_check: ReplicaCheck | None = None
    examine: Callable[[Any, dict[str, float]], Any] | None = None  # documents of a suspect step; IncidentResponder
    adjustments: list[Adjustment] = field(default_factory=list)
    recovery_checks: list[RecoveryCheck] = field(default_factory=list)
    held_out_alarm: Alarm | None = None  # of the last evaluation, if it ends the run
    last_incident_step: int = -1
    frequent_saves_until: int = 0  # step
    changes: dict[int, str] = field(default_factory=dict)  # of this start: steps that reopen the window, with reasons

    def lr_scale(self, step: int) -> float:
        return self._scale(step, "lr_scale")

    def clip_scale(self, step: int) -> float:
        return self._scale(step, "clip_scale")

    def _scale(self, step: int, key: str) -> float:
        scale = 1.0
        for adjustment in self.adjustments:
            if adjustment.from_step <= step < adjustment.until_step:
                scale *= getattr(adjustment, key)
        return scale

    def tensors(self) -> dict[str, Tensor]:
        """The judge's window, as a checkpoint names it."""
        return {f"guard.{name}": tensor for name, tensor in self.judge.state().items()}

    def load_tensors(self, state: dict[str, Tensor]) -> None:
        """Load the window from a checkpoint's tensors, if they have one."""
        if window := {name.removeprefix("guard."): state[name] for name in state if name.startswith("guard.")}:
            self.judge.load(window)

    def state(self) -> dict[str, Any]:
        """What the manifest keeps besides the window."""
        return {
            "adjustments": [asdict(adjustment) for adjustment in self.adjustments],
            "ladder": self.ladder.state(),
            "watch": self.detectors.state(),
            "careful_until": self.frequent_saves_until,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.adjustments = [Adjustment(**entry) for entry in state["adjustments"]]
        self.ladder.load(state["ladder"])
        self.detectors.load(state["watch"])
        self.frequent_saves_until = state["careful_until"]


@dataclass
class Recorder:
    """Writes what happens into the run's directory and shows it."""

    run: RunWriter
    view: View
    flops_per_token: int
    peak_flops: float
    progress: Progress = field(default_factory=Progress)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=1024))  # records of the last steps
    profiler: Profiler | None = None
    requests: RequestReader | None = None  # from outside, on rank 0
    readings: RankReadings | None = None
    write_error: str = ""  # why records wait in memory, as last reported
    disk_full: bool = False  # records wait and a save has failed: the loop ends

    def event(self, kind: str, **details: Any) -> None:
        """Add to the run's events and show it."""
        self.view.event(self.run.event(kind, **details))

    def report_write_error(self) -> None:
        """An event when the disk begins to refuse records. They wait in memory; if the next save fails too, the run
        ends."""
        error = self.run.unwritten
        if error and not self.write_error:
            self.event("write_failed", reason=f"{error}; records wait in memory until there is room")
        self.write_error = error


@dataclass
class Job:
    """One run, ready to continue from `start_step`."""

    engine: Engine
    data: DataFeed
    guard: Guard
    recorder: Recorder
    saver: CheckpointSaver
    start_step: int = 0
    interrupt: Interrupt = field(default_factory=Interrupt)
    faults: Faults | None = None
    rollouts: Rollouts | None = None
    clocks: dict[str, Clock] = field(default_factory=dict)

    @property
    def spec(self) -> RunSpec:
        return self.engine.spec

    @property
    def plan(self) -> TrainPlan:
        return self.engine.plan

    @property
    def world(self) -> World:
        return self.engine.world

    def lr(self, step: int) -> float:
        """The schedule's learning rate, lowered for a while after a rollback."""
        return self.engine.schedule.lr(step) * self.guard.lr_scale(step)

    def clip(self, step: int) -> float:
        return self.spec.optimizer.clip * self.guard.clip_scale(step)

    def state(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name. Frozen weights that the base holds are left out; the rest of a run is
        closed-form or in the manifest."""
        return self._without(self.engine.base.tensors if self.engine.base else ())

    def snapshot_state(self) -> dict[str, Tensor]:
        """What a step can change, by name: the state without frozen weights."""
        return self._without(frozen_names(self.engine.model))

    def frozen_digest(self) -> Tensor:
        """A digest of the bits of this rank's frozen weights, on the device."""
        return digest(local(p) for p in self.engine.model.parameters() if not p.requires_grad)

    def _without(self, weights: Collection[str]) -> dict[str, Tensor]:
        state = {name: t for name, t in self.engine.state().items() if name.removeprefix("model.") not in weights}
        return state | self.guard.tensors()

    def load_targets(self) -> dict[str, Tensor]:
        """Tensors for a load to write into; then call `engine.finish_load`."""
        return self.engine.load_targets() | self.guard.tensors()

    def guard_state(self) -> dict[str, Any]:
        """What the manifest keeps of the guard, with all banned documents: past steps replay as they were."""
        banned = [[*document, position] for document, position in dict(self.data.stream.banned).items()]
        return {**self.guard.state(), "bans": banned}

    def clock(self, name: str, interval: Interval) -> Clock:
        """A clock that runs on over incidents: frequent incidents must not postpone saves for ever."""
        return self.clocks.setdefault(name, Clock(interval))

    def span(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step: notes the phase for the watchdog, and marks it for an attached profiler."""
        self.guard.phase_tracker.enter_phase(name)
        profiler = self.recorder.profiler
        return nullcontext() if profiler is None else profiler.span(name)

    def check_interrupt(self) -> None:
        """Between two micro-batches: raises Abandoned if a signal arrived and the step can be abandoned."""
        if self.interrupt.signal and self.engine.can_abandon_step:
            raise Abandoned


@dataclass
class Incident:
    """Why the loop stopped: a vetoed step, or an alarm that needs more than a note. Nothing was updated since the step
    was judged, so the weights are those that it was computed with."""

    step: int
    symptom: str
    severity: str  # "veto", "suspect" for an accepted step with a convicted document, the alarm's, or "request"
    record: dict[str, Any]
    statistics: dict[str, float]
    batches: list[Batch]
    alarm: Alarm | None = None
    trial: Any = None  # a `trial.case.Trial` that was already held
    request: ControlRequest | None = None  # a rollback that was asked for


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: finished, interrupted, failed, stopped, or at an incident that the caller must handle before
    it calls the loop again. `step` steps are done."""

    kind: str
    reason: str
    step: int
    validation: dict[str, Any] | None = None
    incident: Incident | None = None
