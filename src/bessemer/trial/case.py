"""The case of a suspicious step: the scene it was judged at, what the trial found, what was done, how it ended.

`Case.to_json` is the report in JSON, and the Markdown and HTML reports are pure functions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bessemer.data.stream.batches import Batch
from bessemer.run.journal import json_ready

Verdict = Literal["data", "data x state", "numerics", "hardware", "learning rate", "undetermined"]


@dataclass(frozen=True)
class NormalRange:
    """What was usual before the step: centre and robust scale of the loss and of the log of the gradient norm, and
    how many scales make an outlier."""

    loss: float
    loss_scale: float
    grad_norm: float  # the centre, not its log
    grad_scale: float  # of the log
    loss_sigma: float
    grad_sigma: float


@dataclass
class StepScene:
    """A step as it was judged. The job's weights are those it was computed with: no update was made since."""

    step: int
    symptom: str
    lr: float
    loss: float
    grad_norm: float
    normal: NormalRange
    batches: list[Batch]  # its micro-batches
    history: Sequence[dict[str, Any]]  # records of the steps before, as in the metrics, oldest first


@dataclass(frozen=True)
class EarlierState:
    """A healthy state from before. `load` puts it into the job's model and optimizer."""

    step: int
    origin: str  # "memory", or the checkpoint's name
    load: Callable[[], None]


@dataclass(frozen=True)
class AccusedDocument:
    """A document of the step: where it is, what it has to do with the loss and the gradient, and how it reads."""

    source: str
    file: str
    row: int
    document_id: str
    document: int  # index in the source's store; (source, document) is what can be banned
    tokens: int
    mean_loss: float
    loss_share: float | None  # None where the loss is not finite
    grad_share: float | None  # None where it was not measured
    convicted: bool
    excerpt: str


@dataclass(frozen=True)
class Experiment:
    """One question put to the model: the same step under one other circumstance."""

    name: str  # repeat, other batches, without the accused, whole document, earlier weights, fp32, replay, ...
    question: str
    loss: float
    grad_norm: float | None  # None where only the loss was asked for
    normal: bool
    detail: str = ""


@dataclass(frozen=True)
class LayerEvidence:
    """A module or parameter and how far it was from normal: the value at the scene, the same on a normal batch."""

    name: str
    quantity: str  # "output rms", "largest output", "gradient norm", "non-finite outputs", ...
    value: float
    normal: float


@dataclass(frozen=True)
class Trial:
    """What the trial found."""

    verdict: Verdict
    confidence: float
    reason: str
    state_healthy: bool  # the weights behave on other batches: no rollback is needed
    accused: list[AccusedDocument] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    layers: list[LayerEvidence] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    spread: float | None = None  # relative, of the repeats: what counts as the same result on this device
    began_at: int | None = None  # the step whose update did the damage, where it is not the judged one
    seconds: float = 0.0
    cut_short: list[str] = field(default_factory=list)  # experiments that the time budget left out


@dataclass
class Action:
    """One thing that was done: veto, rollback, skip, exclude, lower lr, save, stop."""

    kind: str
    step: int
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recovery:
    """Whether the loss came back to its trend: the first step at which it stayed there, and how far it was then."""

    rejoined_at: int | None
    steps: int | None
    loss: float | None
    trend: float | None


@dataclass
class IncidentCase:
    """Everything about one incident. It is written when the trial ends, and again when recovery is proven or not."""

    run: str
    step: int
    time: float
    symptom: str
    observed: dict[str, float]  # loss, grad_norm, lr, and deviations loss_z, grad_z
    normal: NormalRange
    trial: Trial | None
    actions: list[Action] = field(default_factory=list)
    recovery: Recovery | None = None
    prevention: list[str] = field(default_factory=list)  # lines for the spec or for people
    series: list[dict[str, Any]] = field(default_factory=list)  # step, loss, grad_norm, lr, veto around the step

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json_ready(asdict(self))
        return found
