"""The case of a suspicious step: how it was judged, what the trial found, what was done, how it ended; and the verdict,
a pure function of what the experiments measured.

`IncidentCase.to_json` is the JSON report; the Markdown and HTML reports are pure functions of the case.
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
    """Centre and robust scale of the loss and of the log gradient norm before the step, and how many scales make an
    outlier."""

    loss: float
    loss_scale: float
    grad_norm: float  # the centre, not its log
    grad_scale: float  # of the log
    loss_sigma: float
    grad_sigma: float


@dataclass
class StepScene:
    """A step as it was judged. The job's weights are still those that it was computed with."""

    step: int
    symptom: str
    lr: float
    loss: float
    grad_norm: float
    normal: NormalRange
    batches: list[Batch]  # micro-batches
    history: Sequence[dict[str, Any]]  # metrics of the steps before, oldest first


@dataclass(frozen=True)
class EarlierState:
    """An earlier healthy state. `load` loads it into the job's model and optimizer."""

    step: int
    origin: str  # "memory", or the checkpoint's name
    load: Callable[[], None]


@dataclass(frozen=True)
class AccusedDocument:
    """A document of the step: its location, its share of loss and gradient, and an excerpt."""

    source: str
    file: str
    row: int
    document_id: str
    document: int  # index in the source's store; (source, document) can be banned
    tokens: int
    mean_loss: float
    loss_share: float | None  # None if the loss is not finite
    grad_share: float | None  # None if not measured
    convicted: bool
    excerpt: str


@dataclass(frozen=True)
class Experiment:
    """The same step with one thing changed."""

    name: str  # repeat, other batches, without the accused, whole document, earlier weights, fp32, replay, ...
    question: str
    loss: float
    grad_norm: float | None  # None if only the loss was measured
    normal: bool
    detail: str = ""


@dataclass(frozen=True)
class LayerEvidence:
    """A quantity of a module or parameter at the step, and on a normal batch."""

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
    state_healthy: bool  # other batches are normal at these weights: no rollback needed
    accused: list[AccusedDocument] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    layers: list[LayerEvidence] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    spread: float | None = None  # relative, between repeats on this device
    began_at: int | None = None  # the step whose update did the damage, if another
    seconds: float = 0.0
    cut_short: list[str] = field(default_factory=list)  # skipped experiments


@dataclass
class Action:
    """One action of the guard: veto, rollback, skip, exclude, lower lr, save, stop."""

    kind: str
    step: int
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recovery:
    """Whether the loss returned to its trend: the first step at which it stayed there, and the loss then."""

    rejoined_at: int | None
    steps: int | None
    loss: float | None
    trend: float | None


@dataclass
class IncidentCase:
    """Everything about one incident. Written when the trial ends, and again when the recovery is known."""

    run: str
    step: int
    time: float
    symptom: str
    observed: dict[str, float]  # loss, grad_norm, lr, and deviations loss_z, grad_z
    normal: NormalRange
    trial: Trial | None
    actions: list[Action] = field(default_factory=list)
    recovery: Recovery | None = None
    prevention: list[str] = field(default_factory=list)  # advice
    series: list[dict[str, Any]] = field(default_factory=list)  # step, loss, grad_norm, lr, veto around the step

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(asdict(self))
        return result


QUIET = 0.35  # a step below this share of the guard's limit is no anomaly
CORRUPT = 10.0  # times the spread of two replays: training did not produce these weights
GAP = 10.0  # times the spread of repeats: the result is not reproducible
LR_JUMP = 3.0  # times the usual learning rate


@dataclass
class Evidence:
    """Results of the experiments. Numbers are excesses as `Yardstick` measures them (1 is the guard's limit); None
    means that an experiment did not run."""

    observed: float
    limit: float = 1.0
    repeat: float | None = None  # the same batch at the same weights
    gap: float = 0.0  # between observed and repeated, in units of the repeats' spread
    before: float | None = None  # batches of earlier accepted steps, at the same weights
    after: float | None = None  # batches of the following steps
    fp32: float | None = None
    without: float | None = None  # the batch without the accused documents
    earlier: float | None = None  # the batch at earlier weights, relative to other batches there
    replay: float | None = None  # the batch at replayed weights
    corrupt: float | None = None  # difference to replayed weights, in units of the spread
    planned_lr: float | None = None  # after a replay with the usual learning rates
    lower_lr: float | None = None  # after a replay with a tenth of them
    vetoed: float | None = None  # after a replay that vetoed outliers
    convicted: bool = False  # documents of the step that did the damage
    lr_jump: float = 1.0  # largest recorded learning rate over the usual one
    left_out: bool = False

    def normal(self, value: float | None) -> bool:
        return value is not None and value <= self.limit

    def abnormal(self, value: float | None) -> bool:
        return value is not None and value > self.limit

    @property
    def damaged(self) -> bool:
        """The weights are abnormal on batches that were normal in training."""
        return self.abnormal(self.before if self.before is not None else self.after)

    @property
    def transient(self) -> bool:
        return self.gap > GAP and self.normal(self.repeat)

    @property
    def numerical(self) -> bool:
        return self.abnormal(self.repeat) and self.normal(self.fp32)

    @property
    def state_healthy(self) -> bool:
        """No rollback is needed: other batches are normal, or the step is normal in fp32."""
        return self.numerical or not self.damaged


STEP_IS_NORMAL = "the step is within its normal range: no fault found"
Ruling = tuple[Verdict, float, str]


def decide(e: Evidence) -> Ruling:
    """(verdict, confidence, reason)."""
    if e.observed <= QUIET:
        return "undetermined", 1 - 0.5 * e.observed / QUIET, STEP_IS_NORMAL
    if e.repeat is None:
        return "undetermined", 0.0, "the step could not be repeated"
    if e.transient:
        reason = "the same batch on the same weights is normal now: the step's numbers were not reproducible"
        return "hardware", _confidence(e, e.repeat, e.before), reason
    if e.numerical:
        reason = "the step is normal in fp32 and not in the run's own precision"
        return "numerics", _confidence(e, e.repeat, e.fp32), reason
    if e.corrupt is not None and e.corrupt > CORRUPT:
        reason = "a replay of the recorded steps leads to other weights: not training changed them"
        margin = _confidence(e, e.replay if e.normal(e.replay) else None)
        return "hardware", margin * (1 - 0.4 * CORRUPT / e.corrupt), reason
    return _damaged(e) if e.damaged else _data(e)


def _damaged(e: Evidence) -> Ruling:
    """Other batches are abnormal too, and as far as known a replay leads to the same weights."""
    if e.normal(e.planned_lr):
        reason = "the weights are damaged for every batch; after a replay with the usual learning rates they are not"
        return "learning rate", _confidence(e, e.before, e.planned_lr), reason
    if e.normal(e.vetoed):
        reason = "the weights are damaged for every batch; after a replay without an accepted step before they are not"
        sure = _confidence(e, e.before, e.vetoed)
        if e.convicted:
            return "data", sure, f"{reason}, and that step is normal without some of its documents"
        return "data x state", 0.85 * sure, reason
    if e.normal(e.lower_lr):
        reason = "the damage comes back in a replay, and does not with a tenth of the learning rate"
        return "learning rate", 0.8 * _confidence(e, e.before, e.lower_lr), reason
    if e.corrupt is not None:
        return "undetermined", 0.0, "the damage comes back in a replay, whatever of it was changed"
    if e.lr_jump >= LR_JUMP:
        reason = f"the weights are damaged after a learning rate {e.lr_jump:.3g} times the usual: not proven"
        return "learning rate", 0.5, reason
    return "undetermined", 0.0, "the weights are damaged for every batch, and no replay could tell by what"


def _data(e: Evidence) -> Ruling:
    """The weights are normal on other batches, as far as tested."""
    known = e.before if e.before is not None else e.after
    reason = "other batches are normal on these weights" if known is not None else "no other batch was tried"
    explained = e.normal(e.without)
    if explained:
        reason += ", this one is without the accused documents"
    elif e.abnormal(e.after):
        reason += ", those that follow are like this one: the data changed for good"
    elif e.without is not None:
        reason += ", this one is not even without the accused documents"
    # Earlier weights show whether the documents alone are the cause.
    weight = (1.0 if explained else 0.75) * (1.0 if known is not None else 0.75)
    if e.normal(e.earlier):
        sure = weight * _confidence(e, known, e.earlier, e.without if explained else None)
        return "data x state", sure, f"{reason}; earlier weights take the whole batch"
    if e.abnormal(e.earlier):
        sure = weight * _confidence(e, known, e.earlier, e.without if explained else None)
        return "data", sure, f"{reason}; earlier weights do not take it either"
    if explained:
        return "data", 0.85 * weight * _confidence(e, known, e.without), reason
    return "undetermined", 0.0, f"{reason}; earlier weights could not be tried"


def _confidence(e: Evidence, *values: float | None) -> float:
    """From 0.6, if a value that the rule uses is at the limit, to 1 if all are far from it; less if experiments were
    skipped."""
    measured = [value for value in values if value is not None]
    margins = [1 - v / e.limit if v <= e.limit else 1 - e.limit / v for v in measured]
    return (0.6 + 0.4 * min(margins, default=1.0)) * (0.95 if e.left_out else 1.0)
