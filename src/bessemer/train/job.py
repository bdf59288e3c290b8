"""Job: everything that the loop works with, put together once. The loop itself is in `loop.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bessemer.data.own_stream import ForwardStream
from bessemer.data.stream import BatchStream
from bessemer.guard.judge import Judge
from bessemer.model.transformer import Decoder
from bessemer.optim.guarded import GuardedAdamW
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import TrainPlan
from bessemer.run.directory import RunWriter
from bessemer.spec.schema import RunSpec
from bessemer.train.evaluate import Evaluator
from bessemer.train.objective import CausalLM


class View(Protocol):
    """Who watches: a terminal, a log."""

    def step(self, record: dict[str, Any]) -> None: ...
    def validation(self, record: dict[str, Any]) -> None: ...
    def event(self, record: dict[str, Any]) -> None: ...


class Saver(Protocol):
    """Makes a checkpoint of the job at a step; the name of it, or None when the disk refused (said in an event)."""

    def save(self, job: Job, step: int, validation_loss: float | None) -> str | None: ...


@dataclass
class Progress:
    """What has been done over all starts of the run; saved with every checkpoint."""

    tokens: int = 0
    elapsed_s: float = 0.0
    vetoes: int = 0
    clipped: int = 0
    best_validation: float | None = None
    evaluations_since_best: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Interrupt:
    """Set by a signal; the loop finishes the step, saves and leaves."""

    signal: str | None = None


@dataclass
class Job:
    """One run, ready to go on from `start_step`."""

    spec: RunSpec
    plan: TrainPlan
    device: torch.device
    model: Decoder
    objective: CausalLM
    optimizer: GuardedAdamW
    schedule: Schedule
    judge: Judge
    stream: BatchStream | ForwardStream
    evaluator: Evaluator
    run: RunWriter
    view: View
    saver: Saver
    flops_per_token: int
    peak_flops: float
    interrupt: Interrupt = field(default_factory=Interrupt)
    progress: Progress = field(default_factory=Progress)
    start_step: int = 0
    nonfinite_streak: int = 0

    def state(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name. Everything else about a run is closed-form or in the manifest."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        state |= {f"guard.{name}": tensor for name, tensor in self.judge.state().items()}
        return state

    def event(self, kind: str, **details: Any) -> None:
        """Into the run's events, and in front of whoever watches."""
        self.view.event(self.run.event(kind, **details))


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: finished, interrupted or failed, after `step` steps."""

    kind: str
    reason: str
    step: int
    validation: dict[str, Any] | None = None
