"""The verdict: a pure function of what the experiments found.

Every number is an excess as `Yardstick` gives it (1: the guard's line); None is an experiment that was not made. The
confidence says how far from the line the numbers were that the verdict rests on, less where something was left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.trial.case import Verdict
from bessemer.trial.measure import QUIET

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
