"""Alarms of the detectors, and the robust statistics over blocks of 16 steps that they share.

Medians of blocks are nearly normal, however heavy the tails of single steps. Plain Python: for lists this short numpy's
calls cost more. An alarm is raised once, and again only after the trouble was over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bessemer.run.finding import Finding

BLOCK = 16
SIGMA = 1.4826  # times the median absolute deviation is the standard deviation of a normal distribution
Record = dict[str, Any]


@dataclass
class StepBlock:
    """Consecutive finite steps: `attempts` are all of them, `losses` those of the accepted ones."""

    attempts: list[Record]

    def __post_init__(self) -> None:
        self.accepted = [record for record in self.attempts if record["veto"] is None]
        self.enough = 2 * len(self.accepted) >= BLOCK  # accepted steps for a level
        self.step: int = self.attempts[-1]["step"]
        self.losses: list[float] = [record["loss"] for record in self.accepted]
        self.log_norms = [log_norm(record) for record in self.accepted]
        if self.enough:
            self.loss, self.loss_spread = median(self.losses), robust_std(self.losses)


def log_norm(record: Record) -> float:
    return math.log(max(record["grad_norm"], 1e-30))


def relative_scale(level: float, unit: float | None = None) -> float:
    """The reference for a rise of the loss. Losses near zero are memorised data, not a small scale."""
    return max(abs(level), 0.1 if unit is None else unit)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def robust_std(values: Sequence[float]) -> float:
    """Robust standard deviation around the median."""
    center = median(values)
    return SIGMA * median([abs(value - center) for value in values])


def robust_std_around_line(values: Sequence[float]) -> float:
    """Robust standard deviation around a line through the medians of the two halves: a trend is not noise."""
    n = len(values)
    half = n // 2
    old, new = median(values[:half]), median(values[half:])
    slope = (new - old) / (n / 2)
    start = old - slope * (half - 1) / 2
    return SIGMA * median([abs(value - start - slope * i) for i, value in enumerate(values)])


def theil_sen(values: Sequence[float]) -> tuple[float, float]:
    """Slope per point (the median over all pairs), and Kendall's tau with the time: 1 if every pair rises."""
    n = len(values)
    slopes = [(values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
    rising = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
    return median(slopes), rising / len(slopes)


Severity = Literal["note", "warning", "rollback", "stop"]


@dataclass(frozen=True)
class Alarm:
    """`severity` is what the detector requests; the ladder decides what is done."""

    kind: str
    step: int
    severity: Severity
    finding: Finding


# kind -> likely cause; what to do
ADVICE = {
    "nonfinite": "overflow, bad data or faulty hardware; the update was withheld, and the trial's report names layer "
    "and documents if it comes back",
    "spike": "unusual documents, or a step too large for the state of the weights; nothing if it stays alone: the veto "
    "event names the documents",
    "divergence": "the learning rate is too high for this stage, the data changed, or an update did damage; roll back "
    "and lower optimizer.lr, lengthen schedule.warmup or tighten optimizer.clip",
    "oscillation": "the learning rate is at the edge of stability, or the data repeats with that period; lower "
    "optimizer.lr, or look at how sources are shuffled",
    "plateau": "the learning rate no longer fits, or the data is learnt; try a learning-rate range test or decay it, "
    "and check that the data is what was meant",
    "gradient_exploding": "the weights moved to a steep place: learning rate, a bad update or bad data; roll back if "
    "the loss follows, lower optimizer.lr or optimizer.clip",
    "gradient_vanishing": "saturated units, a broken loss mask or a layer that passes no gradient; look at the layers' "
    "gradient norms, check that targets still carry weight",
    "learning_rate": "something changed the learning rate outside the schedule; find what set it, updates made with it "
    "may have to be undone",
    "loss_scale": "gradients overflow in fp16 at every scale; use precision: bf16, roll back to before the scale fell",
    "slowdown": "a throttled or shared device, slow storage or network, a host that swaps; look at clocks, temperature "
    "and what else runs there",
    "throttled": "heat, a lowered power limit or a weak supply holds the clock of a GPU down; look at its temperature, "
    "fans and limits (nvidia-smi -q -d CLOCK,POWER,TEMPERATURE), and move the run if it lasts",
    "data_wait": "reading or tokenizing is slower than the model; prepare the data first (bessemer data), or use "
    "faster storage",
    "straggler": "a throttled device, a shared host or a slow link on those ranks; look at their hosts and replace "
    "them if it lasts",
    "weights_differ": "a faulty device or memory, or an update that one process made otherwise; roll back to "
    "a state that was equal on all processes, and remove the named host or device if it happens again",
    "memory_growth": "something keeps what it should release: tensors with their graph, caches; save before that step "
    "and restart, look for lists that collect tensors",
    "clock_jump": "the clock was set, or the machine slept; durations are right (steady clock), times of events before "
    "and after do not compare",
    "overfitting": "the data is repeated too often for the model's size; stop here (budget.stop.patience), use more "
    "data or fewer epochs, or raise weight decay",
    "nonfinite_layer": "overflow inside the layer, or damaged weights; roll back, and compute it in fp32 if it comes "
    "back",
    "layer_gradient_exploding": "this layer's weights or inputs moved to a steep place; tighten optimizer.clip or "
    "lower optimizer.lr",
    "layer_gradient_vanishing": "the layer is cut off: saturated, frozen or bypassed; check requires_grad and the "
    "activations of this layer and the next",
    "update_large": "the learning rate is too high for this layer; lower optimizer.lr, lengthen schedule.warmup",
    "update_small": "updates are lost to rounding, or the learning rate is far too low; keep weights in fp32, raise "
    "optimizer.lr",
    "activation_growth": "the layer's weights have grown, or a norm no longer holds; raise weight decay or lower "
    "optimizer.lr, roll back if the loss follows",
    "dead_units": "a too large update closed the gates; roll back to before, lower optimizer.lr",
    "saturated_units": "pre-activations have grown without bound; lower optimizer.lr, raise weight decay",
    "attention_logit_growth": "queries and keys grow together, which ends in loss spikes; set model.qk_norm: true in a "
    "new run, lower optimizer.lr or raise weight decay in this one",
    "attention_entropy_collapse": "attention logits are so large that a query sees one key; lower optimizer.lr, set "
    "model.qk_norm: true in a new run",
    "reward_hacking": "the reward pays for something other than good answers, and the model has learned to supply it; "
    "read the best answers in the evidence, correct the reward, and continue from the best checkpoint (a "
    "format that you want is listed under guard.alignment.expected)",
    "kl_runaway": "updates move the policy away from its reference without gain; lower optimizer.lr or raise "
    "rl.kl.beta (or set rl.kl.limit), and continue from the best checkpoint",
    "entropy_collapse": "the policy has stopped exploring, so no answer is better than the others of its group; raise "
    "rl.clip_high or rl.temperature, lower optimizer.lr, add rl.kl.beta, and continue from before the collapse",
    "length_drift": "the loss or the reward pays for length; aggregate by token or constant (rl.aggregate), or "
    "penalise length (rl.overlong)",
    "format_collapse": "answers no longer end or keep their form; continue from the best checkpoint with a lower "
    "optimizer.lr, penalise what is too long (rl.overlong), or weigh the format reward more",
    "equal_groups": "all answers to a prompt get the same reward, so that most of the batch has no gradient; use "
    "prompts of other difficulty or rl.dynamic_sampling, or stop if the task is solved",
    "reward_drift": "pair losses leave the reward's level free, and it drifts; centre the rewards (center in the "
    "reward section), or normalise them where they are used",
    "over_optimisation": "the training score is gained at the cost of the held-out one; use the best checkpoint, stop "
    "earlier (budget.stop.patience), or stay closer to the reference (beta)",
    "likelihood_displacement": "the loss lowers the chosen answers and lowers the rejected ones more (Razin et al. "
    "2024), which moves probability to answers that nobody chose; add dpo.sft_weight, raise dpo.beta, lower "
    "optimizer.lr, or remove pairs whose answers are nearly the same",
    "router_collapse": "the router sends nearly everything to a few experts; raise the balance loss, roll back to "
    "before",
}  # fmt: skip


def debounce(active: dict[str, int], key: str, bad: bool, rearm: int) -> bool:
    """True when trouble begins; again only after `rearm` clear evaluations in a row. Updates `active_parameters`."""
    if bad:
        new = key not in active
        active[key] = 0
        return new
    if key in active:
        active[key] += 1
        if active[key] >= rearm:
            del active[key]
    return False


def make_alarm(
    kind: str, step: int, severity: Severity, symptom: str, confidence: float, **evidence: Any
) -> list[Alarm]:
    """One alarm, with the cause and fix of its kind."""
    cause, fix = ADVICE[kind].split("; ")
    return [Alarm(kind, step, severity, Finding(symptom, evidence, cause, confidence, fix))]
