"""Job: everything that the loop works with, put together once. The loop itself is in `loop.py`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.guard.detect.alarm import Alarm
from bessemer.guard.detect.watch import Detectors
from bessemer.guard.judge import Judge
from bessemer.guard.ladder import Ladder, RecoveryCheck
from bessemer.guard.layer_stats import LayerStats
from bessemer.guard.replica_check import ReplicaCheck
from bessemer.guard.watchdog import PhaseTracker, StepPace, Watchdog
from bessemer.model.transformer import Decoder
from bessemer.optim.ema import Ema
from bessemer.optim.guarded import GuardedOptimizer
from bessemer.optim.schedule import Schedule
from bessemer.parallel.world import World
from bessemer.plan.decide import Interval, TrainPlan
from bessemer.run.directory import RunWriter
from bessemer.spec.schema import RunSpec
from bessemer.train.evaluate import Evaluator
from bessemer.train.lowp.loss_scale import LossScale
from bessemer.train.memory.snapshots import MemorySnapshots
from bessemer.train.objective import Pretrain
from bessemer.train.pipeline_runner import PipelineRunner


class View(Protocol):
    """Who watches: a terminal, a log."""

    def step(self, record: dict[str, Any]) -> None: ...
    def validation(self, record: dict[str, Any]) -> None: ...
    def event(self, record: dict[str, Any]) -> None: ...

    def micro_batch(self, step: int, done: int, total: int, tokens: int) -> None:
        """So many of a step's micro-batches are given to the device; 0 when the step begins. `tokens` are the whole
        step's. Called for every one of them: it must cost nothing."""
        ...

    def activity(self, what: str, done: int = 0, total: int = 0) -> None:
        """What is done outside of steps, such as saving."""
        ...


class Saver(Protocol):
    """Makes checkpoints of the job."""

    shelf: CheckpointStore

    def save(self, job: Job, step: int, validation_loss: float | None) -> str | None:
        """The checkpoint's name, or None when the disk refused (said in an event)."""
        ...

    def poll(self, job: Job) -> None:
        """Tell of a save that ended in the background."""
        ...

    def wait(self, job: Job, uploads: bool = False) -> bool:
        """Wait for a save in flight; False if it failed."""
        ...

    def interval_s(self, job: Job) -> float | None:
        """Seconds between saves where the spec leaves that open."""
        ...

    def confirm(self, job: Job, done: int) -> None:
        """Mark a checkpoint as healthy when enough quiet steps have come after it."""
        ...

    def abandon(self, job: Job, after_step: int) -> list[str]:
        """Delete what was saved after a step that the run went back to; the names."""
        ...

    def save_scene(self, job: Job, shelf: CheckpointStore, step: int) -> Path:
        """The judged state of a step, outside of the run's own checkpoints."""
        ...


class Faults(Protocol):
    """What `bessemer chaos` does to a run on purpose. Called by the loop at the places where things go wrong."""

    def before_step(self, job: Job, step: int) -> None:
        """Before the forward pass: weights, layers, the process itself."""
        ...

    def after_backward(self, job: Job, step: int) -> None:
        """Gradients are there, and not yet measured."""
        ...

    def lr(self, step: int, planned: float) -> float:
        """The learning rate that the update really uses."""
        ...


class Profiler(Protocol):
    """Who looks at where a step's time goes; see `profile.py`."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step."""
        ...

    def step(self, job: Job) -> None:
        """After a step."""
        ...


@dataclass(frozen=True)
class Adjustment:
    """A gentler step for a while after a rollback: factors on the learning rate and on the clipping limit."""

    from_step: int
    until_step: int
    lr_scale: float
    clip_scale: float


@dataclass
class Progress:
    """What has been done over all starts of the run; saved with every checkpoint."""

    tokens: int = 0
    elapsed_s: float = 0.0
    vetoes: int = 0
    clipped: int = 0
    best_validation: float | None = None
    evaluations_since_best: int = 0
    rollbacks: int = 0
    trial_s: float = 0.0
    first_validation: dict[str, float] = field(default_factory=dict)  # of each source, before the first step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Interrupt:
    """Set by a signal; the loop abandons the step between two micro-batches where it can, and else finishes it; then it
    saves and leaves."""

    signal: str | None = None


class Abandoned(Exception):
    """A step or an evaluation was left between two micro-batches, because of a signal."""


@dataclass
class Clock:
    """When an interval, in steps or seconds, is due."""

    interval: Interval
    last_s: float = field(default_factory=time.monotonic)

    def due(self, done: int, hurry: int = 1, seconds: float | None = None) -> bool:
        """After `done` steps; `hurry` times as often as usual; `seconds` where they are only known as the run goes."""
        seconds = seconds or self.interval.seconds
        return self.by_steps(done, hurry) or (
            seconds is not None and (time.monotonic() - self.last_s) * hurry >= seconds
        )

    def by_steps(self, done: int, hurry: int = 1) -> bool:
        """Whether it is due by the number of steps, which is the same at every start."""
        return self.interval.steps is not None and done % max(1, self.interval.steps // hurry) == 0

    def both_due(self, done: int) -> bool:
        """When so many steps and so much time have passed, for what must stay cheap in fast and in slow runs."""
        steps, seconds = self.interval.steps, self.interval.seconds
        return done % (steps or 1) == 0 and time.monotonic() - self.last_s >= (seconds or 0.0)

    def reset(self) -> None:
        self.last_s = time.monotonic()


@dataclass
class Job:
    """One run, ready to go on from `start_step`."""

    spec: RunSpec
    plan: TrainPlan
    device: torch.device
    model: Decoder
    objective: Pretrain
    optimizer: GuardedOptimizer
    schedule: Schedule
    judge: Judge
    stream: BatchStream | IterableStream
    evaluator: Evaluator
    run: RunWriter
    view: View
    saver: Saver
    flops_per_token: int
    peak_flops: float
    watch: Detectors
    inside: LayerStats
    ladder: Ladder
    decode: Callable[[list[int]], str]
    ema: Ema | None = None
    world: World = field(default_factory=World)
    pipeline: PipelineRunner | None = None  # where layers are held in turn
    scaling: LossScale | None = None  # with fp16
    copies: MemorySnapshots | None = None
    watchdog: Watchdog | None = None
    where: PhaseTracker = field(default_factory=PhaseTracker)
    pace: StepPace | None = None  # of several processes, as is `alike`
    alike: ReplicaCheck | None = None
    faults: Faults | None = None
    profiler: Profiler | None = None
    examine: Callable[[Any, dict[str, float]], Any] | None = None  # the documents of a suspect step; see Responder
    interrupt: Interrupt = field(default_factory=Interrupt)
    progress: Progress = field(default_factory=Progress)
    start_step: int = 0
    adjustments: list[Adjustment] = field(default_factory=list)
    recovering: list[RecoveryCheck] = field(default_factory=list)
    last_trouble: int = -1  # step of the last incident
    unwritten: str = ""  # why records wait in memory, as last told
    disk_refuses: bool = False  # records wait, and a save has failed: the loop leaves
    careful_until: int = 0  # saves are more frequent before this step
    clocks: dict[str, Clock] = field(default_factory=dict)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=1024))  # records of the last steps

    def state(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name. Everything else about a run is closed-form or in the manifest. Where an
        engine keeps weights and moments its own way they are copies, made by all processes together."""
        state = {f"model.{name}": tensor for name, tensor in self.optimizer.weights(self.model).items()}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return state | self._beside()

    def targets(self) -> dict[str, Tensor]:
        """The same tensors, or room for them, to load into; then `put_back`."""
        return self.optimizer.targets(self.model) | self._beside()

    def put_back(self, state: dict[str, Tensor]) -> None:
        """After a load into `targets`, or into some of them."""
        self.optimizer.put_back(self.model, state)

    def _beside(self) -> dict[str, Tensor]:
        """Of a checkpoint, all but weights and moments."""
        state: dict[str, Tensor] = {}
        if self.ema:
            state |= {f"ema.{name}": tensor for name, tensor in self.ema.state().items()}
        if self.scaling:
            state |= {f"scaling.{name}": tensor for name, tensor in self.scaling.state().items()}
        state |= {f"guard.{name}": tensor for name, tensor in self.judge.state().items()}
        return state

    def guard_state(self) -> dict[str, Any]:
        """What the guard has to remember besides its window, for the manifest."""
        return {
            "adjustments": [asdict(adjustment) for adjustment in self.adjustments],
            "ladder": self.ladder.state(),
            "watch": self.watch.state(),
            "careful_until": self.careful_until,
            # Those of the spec's lists too: past steps replay, and are gone back to, as they were.
            "bans": [[*document, position] for document, position in dict(self.stream.banned).items()],
        }

    def load_guard_state(self, state: dict[str, Any]) -> None:
        self.adjustments = [Adjustment(**entry) for entry in state["adjustments"]]
        self.ladder.load(state["ladder"])
        self.watch.load(state["watch"])
        self.careful_until = state["careful_until"]

    def clock(self, name: str, interval: Interval) -> Clock:
        """One that goes on over incidents: trouble every few minutes must not put off saves for ever."""
        return self.clocks.setdefault(name, Clock(interval))

    def _scale(self, step: int, key: str) -> float:
        scale = 1.0
        for adjustment in self.adjustments:
            if adjustment.from_step <= step < adjustment.until_step:
                scale *= getattr(adjustment, key)
        return scale

    def lr(self, step: int) -> float:
        """The learning rate of a step: the schedule's, and gentler for a while after a rollback."""
        return self.schedule.lr(step) * self._scale(step, "lr_scale")

    def clip(self, step: int) -> float:
        return self.spec.optimizer.clip * self._scale(step, "clip_scale")

    @property
    def can_abandon(self) -> bool:
        """Whether a step may end between two micro-batches without a trace: one process decides alone, and nothing is
        updated before the backward passes are over."""
        return self.world.size == 1 and self.optimizer.judged_first and self.optimizer.whole

    def check_interrupt(self) -> None:
        """Between two micro-batches: raises Abandoned where a signal asks to leave and that is possible here."""
        if self.interrupt.signal and self.can_abandon:
            raise Abandoned

    def event(self, kind: str, **details: Any) -> None:
        """Into the run's events, and in front of whoever watches."""
        self.view.event(self.run.event(kind, **details))


@dataclass
class Incident:
    """Why the loop stood still: a step that was vetoed, or an alarm that asks for more than a note. Nothing was updated
    since the step was judged, so the job's weights are those it was computed with."""

    step: int
    symptom: str
    severity: str  # "veto", "suspect" for an accepted step with a convicted document, or the alarm's
    record: dict[str, Any]
    statistics: dict[str, float]
    batches: list[Batch]
    alarm: Alarm | None = None
    trial: Any = None  # a `trial.case.Trial` that was held already


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: finished, interrupted, failed, or at an incident that somebody has to deal with before it can
    go on. `step` steps are done."""

    kind: str
    reason: str
    step: int
    validation: dict[str, Any] | None = None
    incident: Incident | None = None
