"""The case of a suspicious step: the scene it was judged at, what the trial found, what was done, how it ended.

`Case.to_json` is the report in JSON, and the Markdown and HTML reports are pure functions of it.

The verdict: a pure function of what the experiments found.

Every number is an excess as `Yardstick` gives it (1: the guard's line); None is an experiment that was not made. The
confidence says how far from the line the numbers were that the verdict rests on, less where something was left out.
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


QUIET = 0.35  # a step below this share of the guard's limit is no anomaly
CORRUPT = 10.0  # times the spread of two replays: weights that training did not make
GAP = 10.0  # times the spread of repeats: a result that was not this computation's
LR_JUMP = 3.0  # times the usual learning rate


@dataclass
class Evidence:
    """What the experiments found."""

    observed: float
    limit: float = 1.0
    repeat: float | None = None  # the same batch on the same weights
    gap: float = 0.0  # observed against repeated numbers, in units of what repeats differ by
    before: float | None = None  # batches of accepted steps before, on the same weights
    after: float | None = None  # batches of the steps to come
    fp32: float | None = None
    without: float | None = None  # the batch without the accused documents
    earlier: float | None = None  # the batch on earlier weights, against other batches there
    replay: float | None = None  # the batch on the weights that a replay leads to
    corrupt: float | None = None  # judged against replayed weights, in units of the spread; 0: the same
    planned_lr: float | None = None  # after a replay with the usual learning rates
    lower_lr: float | None = None  # after a replay with a tenth of them
    vetoed: float | None = None  # after a replay that vetoed the outliers on the way
    convicted: bool = False  # documents of the step that did the damage, on the way
    lr_jump: float = 1.0  # the largest recorded learning rate against the usual one
    left_out: bool = False

    def normal(self, value: float | None) -> bool:
        return value is not None and value <= self.limit

    def abnormal(self, value: float | None) -> bool:
        return value is not None and value > self.limit

    @property
    def damaged(self) -> bool:
        """The weights are abnormal on batches that were normal when they were trained on."""
        return self.abnormal(self.before if self.before is not None else self.after)

    @property
    def transient(self) -> bool:
        return self.gap > GAP and self.normal(self.repeat)

    @property
    def numerical(self) -> bool:
        return self.abnormal(self.repeat) and self.normal(self.fp32)

    @property
    def state_healthy(self) -> bool:
        """No rollback is needed: other batches are normal, or would be in fp32."""
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
        return "hardware", _sure(e, e.repeat, e.before), reason
    if e.numerical:
        reason = "the step is normal in fp32 and not in the run's own precision"
        return "numerics", _sure(e, e.repeat, e.fp32), reason
    if e.corrupt is not None and e.corrupt > CORRUPT:
        reason = "a replay of the recorded steps leads to other weights: not training changed them"
        margin = _sure(e, e.replay if e.normal(e.replay) else None)
        return "hardware", margin * (1 - 0.4 * CORRUPT / e.corrupt), reason
    return _damaged(e) if e.damaged else _data(e)


def _damaged(e: Evidence) -> Ruling:
    """Other batches are abnormal too, and the weights are what the recorded steps make of the earlier ones, as far as
    that is known."""
    if e.normal(e.planned_lr):
        reason = "the weights are damaged for every batch; after a replay with the usual learning rates they are not"
        return "learning rate", _sure(e, e.before, e.planned_lr), reason
    if e.normal(e.vetoed):
        reason = "the weights are damaged for every batch; after a replay without an accepted step before they are not"
        sure = _sure(e, e.before, e.vetoed)
        if e.convicted:
            return "data", sure, f"{reason}, and that step is normal without some of its documents"
        return "data x state", 0.85 * sure, reason
    if e.normal(e.lower_lr):
        reason = "the damage comes back in a replay, and does not with a tenth of the learning rate"
        return "learning rate", 0.8 * _sure(e, e.before, e.lower_lr), reason
    if e.corrupt is not None:
        return "undetermined", 0.0, "the damage comes back in a replay, whatever of it was changed"
    if e.lr_jump >= LR_JUMP:
        reason = f"the weights are damaged after a learning rate {e.lr_jump:.3g} times the usual: not proven"
        return "learning rate", 0.5, reason
    return "undetermined", 0.0, "the weights are damaged for every batch, and no replay could tell by what"


def _data(e: Evidence) -> Ruling:
    """The weights are normal on other batches, as far as these were tried."""
    known = e.before if e.before is not None else e.after
    reason = "other batches are normal on these weights" if known is not None else "no other batch was tried"
    explained = e.normal(e.without)
    if explained:
        reason += ", this one is without the accused documents"
    elif e.abnormal(e.after):
        reason += ", those that follow are like this one: the data changed for good"
    elif e.without is not None:
        reason += ", this one is not even without the accused documents"
    # Earlier weights say whether the documents alone are to blame; without them or a cleared batch nothing is known.
    weight = (1.0 if explained else 0.75) * (1.0 if known is not None else 0.75)
    if e.normal(e.earlier):
        sure = weight * _sure(e, known, e.earlier, e.without if explained else None)
        return "data x state", sure, f"{reason}; earlier weights take the whole batch"
    if e.abnormal(e.earlier):
        sure = weight * _sure(e, known, e.earlier, e.without if explained else None)
        return "data", sure, f"{reason}; earlier weights do not take it either"
    if explained:
        return "data", 0.85 * weight * _sure(e, known, e.without), reason
    return "undetermined", 0.0, f"{reason}; earlier weights could not be tried"


def _sure(e: Evidence, *values: float | None) -> float:
    """From 0.6, where a number that the rule rests on lies on the line, to 1 where all are far from it; a little less
    where experiments were left out."""
    known = [value for value in values if value is not None]
    sides = [1 - v / e.limit if v <= e.limit else 1 - e.limit / v for v in known]
    return (0.6 + 0.4 * min(sides, default=1.0)) * (0.95 if e.left_out else 1.0)
