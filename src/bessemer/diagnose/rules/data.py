"""Rules of held-out loss, epochs, and the inside of the model where series show it."""

from __future__ import annotations

import math

import numpy as np

from bessemer.diagnose.rules.causes import make_finding, rank
from bessemer.diagnose.rules.curve import Curve, trend
from bessemer.diagnose.rules.view import RunView
from bessemer.run.finding import Finding


def judge_data(view: RunView) -> list[Finding]:
    findings = [judge_overfitting(view), judge_epochs(view), *judge_validation_gap(view), *judge_inside(view)]
    return [finding for finding in findings if finding]


def judge_overfitting(view: RunView) -> Finding | None:
    """Held-out loss above its minimum and rising while training loss falls."""
    loss, held_out = view.language_loss, view.curve("validation_loss", 4)
    if loss is None or held_out is None:
        return None
    best = int(np.argmin(held_out.values))
    low, last, step = float(held_out.values[best]), float(held_out.values[-1]), int(held_out.steps[best])
    rise, noise = last - low, held_out.noise()
    after = held_out.values[best + 1 :]
    rising = len(after) >= 2 and float(np.median(after[-2:])) >= float(np.median(after[:2])) - noise
    before, since = loss.before(step + 1), loss.since(step)
    if len(before) < 3 or len(since) < 3 or not rising or rise < max(0.03 * abs(low), 3 * noise * (len(after) < 4)):
        return None
    training, end = float(np.median(before.values[-8:])), since.level(0.2)
    if end > training - 0.01 * abs(training):
        return None  # training loss does not fall either: not memorised
    evidence = {
        "best_step": step, "best": round(low, 4), "last": round(last, 4), "training_at_best": round(training, 4),
        "training_last": round(end, 4),
    }  # fmt: skip
    causes = rank(view, overfitting=0.9, validation_mismatch=0.1, epoch_memorised=0.2)
    text = f"held-out loss rises from {low:.3g} (step {step}) to {last:.3g} while training loss falls to {end:.3g}"
    severity = "critical" if rise > 0.3 * abs(low) else "warning"
    return make_finding(text, causes, severity, step, evidence)


def judge_validation_gap(view: RunView) -> list[Finding]:
    """Held-out loss below training loss, a sudden fall of it, or far above from the first evaluation on."""
    loss, held_out = view.language_loss, view.curve("validation_loss", 3)
    if loss is None or held_out is None or len(loss) < 12:
        return []
    training = np.array([_training_at(loss, int(step)) for step in held_out.steps])
    gap = held_out.values - training
    share = gap / np.maximum(np.abs(training), 1e-9)
    late = share[len(share) // 2 :]
    usual = float(np.median(late))
    # The noise of the training level that it is compared with.
    error = 3 * loss.part(len(loss) // 2).noise() / math.sqrt(8) / max(abs(float(np.median(training))), 1e-9)
    evidence = {
        "held_out": [round(float(v), 4) for v in held_out.values[-6:]],
        "training": [round(float(v), 4) for v in training[-6:]],
    }
    if jump := _sudden_fall(held_out, loss):
        step, before, after = jump
        causes = rank(view, validation_leak=0.85, validation_mismatch=0.15)
        text = f"held-out loss falls at once from {before:.3g} to {after:.3g} at step {step}; training loss does not"
        return [make_finding(text, causes, "warning", step, evidence)]
    if usual < -max(0.08, error) and float(np.mean(late < 0)) > 0.9:
        causes = rank(view, validation_leak=0.7, validation_mismatch=0.4, batch_too_small=0.02)
        text = f"held-out loss is {-usual:.0%} below training loss"
        unknown = "Dropout or augmentation in training alone lowers held-out loss by some per cent."
        return [make_finding(text, causes, "warning", held_out.steps[-1], evidence, unknown)]
    first = share[: max(2, len(share) // 3)]
    if (
        min(float(np.min(first)), float(np.median(share))) > max(0.35, 2 * error)
        and float(np.max(share)) < 3 * float(np.min(first)) + 0.5
    ):
        causes = rank(view, validation_mismatch=0.7, overfitting=0.25)
        text = f"held-out loss is {float(np.median(share)):.0%} above training loss from the first evaluation on"
        return [make_finding(text, causes, "warning", held_out.steps[0], evidence)]
    return []


def _training_at(loss: Curve, step: int) -> float:
    """Training loss around a step: the median of the eight last points up to it, or of the next where it starts."""
    before = loss.before(step + 1).values[-8:]
    return float(np.median(before if len(before) >= 2 else loss.values[:2]))


def _sudden_fall(held_out: Curve, loss: Curve) -> tuple[int, float, float] | None:
    """A fall of held-out loss between two evaluations that is far larger than its neighbours and than training's."""
    values = held_out.values
    if len(values) < 5:
        return None
    falls = (values[:-1] - values[1:]) / np.maximum(np.abs(values[:-1]), 1e-9)
    for i in range(1, len(falls)):
        before, after = int(held_out.steps[i]), int(held_out.steps[i + 1])
        trained = 1 - _training_at(loss, after) / max(_training_at(loss, before), 1e-9)
        previous = float(np.max(np.abs(falls[:i][-3:])))
        if (
            falls[i] > 0.15
            and falls[i] > 3 * max(trained, 0.0) + 0.05
            and falls[i] > 2 * previous
            and np.all(values[i + 1 :] < 0.95 * values[i])
        ):
            return after, float(values[i]), float(values[i + 1])
    return None


def judge_epochs(view: RunView) -> Finding | None:
    """Training loss that steps down where epochs start."""
    loss, epochs = view.language_loss, view.curve("epoch", 8)
    if loss is None or epochs is None or len(loss) < 32:
        return None
    turns = [
        int(step) for step, now, before in zip(epochs.steps[1:], epochs.values[1:], epochs.values[:-1], strict=True)
        if math.floor(now + 1e-6) > math.floor(before + 1e-6)
    ]  # fmt: skip
    turns = [step for step in turns if loss.steps[0] < step < loss.steps[-1]]
    if not 1 <= len(turns) <= len(loss) / 12:
        return None
    falls, noise = [], max(loss.noise(), 1e-9)
    reach = max(3, min(8, len(loss) // (4 * (len(turns) + 1))))
    for step in turns:
        before, after = loss.before(step).values[-2 * reach :], loss.since(step + loss.interval()).values[: 2 * reach]
        if len(before) < 2 * reach or len(after) < 2 * reach:
            continue
        inside = max(
            float(np.median(before[:reach]) - np.median(before[reach:])),
            float(np.median(after[:reach]) - np.median(after[reach:])),
        )
        fall = float(np.median(before[reach:]) - np.median(after[:reach]))
        falls.append((fall - max(inside, 0.0)) / max(abs(float(np.median(before))), 1e-9))
    error = noise / math.sqrt(reach) / max(abs(loss.level(0.5)), 1e-9)
    if not falls or float(np.median(falls)) < max(0.03, 3 * error):
        return None
    evidence = {"epoch_starts": turns[:12], "falls": [round(fall, 3) for fall in falls[:12]]}
    causes = rank(view, epoch_memorised=0.85, overfitting=0.3, data_ordered=0.2)
    text = f"the loss steps down by {float(np.median(falls)):.1%} where epochs start (step {turns[0]})"
    severity = "warning" if float(np.median(falls)) > 0.08 else "note"
    return make_finding(text, causes, severity, turns[0], evidence)


def judge_inside(view: RunView) -> list[Finding]:
    """Dead units and routers, where a series shows them."""
    findings = []
    for curve in view.curves_like(r"dead|zero_(share|fraction)|inactive"):
        last = curve.level(0.1)
        if 0.25 < last <= 1 and last > curve.level(0.1, end=False) + 0.1:
            causes = rank(view, dead_units=0.85, lr_too_high=0.3)
            text = f"{curve.name} grows to {last:.0%}"
            findings.append(
                make_finding(text, causes, "warning", curve.steps[-1], {"first": float(curve.values[0]), "last": last})
            )
    experts = view.number("experts")
    for curve in view.curves_like(r"(max|largest).*(expert|load)|(expert|load).*(max|largest)|max_vio"):
        last, rises = curve.level(0.1), trend(curve) > 0.5
        limit = 0.5 if curve.values.max() <= 1 else max(3.0, 0.5 * (experts or 6))
        if last > limit and rises:
            findings.append(_router_finding(view, curve, last))
    for curve in view.curves_like(r"router.*entropy|entropy.*router|expert.*entropy"):
        start = curve.level(0.1, end=False)
        if start > 0 and curve.level(0.1) < 0.35 * start:
            findings.append(_router_finding(view, curve, curve.level(0.1)))
    return findings


def _router_finding(view: RunView, curve: Curve, last: float) -> Finding:
    causes = rank(view, router_collapse=0.85, lr_too_high=0.25)
    evidence = {"first": round(float(curve.values[0]), 4), "last": round(last, 4)}
    text = f"{curve.name} goes from {curve.values[0]:.3g} to {last:.3g}"
    return make_finding(text, causes, "warning", curve.steps[-1], evidence)
