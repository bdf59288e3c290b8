"""Rules of a loss that becomes NaN or infinite, and of the learning rate around a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.diagnose.rules.causes import make_finding, rank
from bessemer.diagnose.rules.view import JudgedRun
from bessemer.run.finding import Cause, Finding

NAN_COUNT = "number of nan iterations"  # of Megatron's lines


def judge_nonfinite(view: JudgedRun) -> Finding | None:
    """NaN or infinite losses, also where a framework hides them: a loss of exactly 0 beside a NaN gradient norm."""
    series = view.run.series.get("loss")
    if series is None or not len(series):
        return None
    norm, evaluation = view.run.series.get("grad_norm"), view.run.series.get("validation_loss")
    bad = series.steps[~np.isfinite(series.values)]
    hidden = False
    if norm is not None and not len(bad):
        bad_norms = norm.steps[~np.isfinite(norm.values)]
        zero = series.steps[series.values == 0.0]
        bad = np.intersect1d(bad_norms, zero)
        hidden = bool(len(bad))
        if not len(bad) and len(bad_norms) >= max(4, 0.2 * len(norm)) and view.precision != "fp16":
            bad = bad_norms
    if not len(bad) and evaluation is not None and len(evaluation) and bool(np.isnan(evaluation.values[-1])):
        bad = evaluation.steps[np.isnan(evaluation.values)]
    counted = _first_counted_nan(view)
    if counted and (not len(bad) or counted[1] <= bad[0]):
        return _counted_nan_finding(view, series, bad, *counted)
    if not len(bad):
        return None
    first, total = int(bad[0]), len(series)
    finite_after = series.steps[np.isfinite(series.values) & (series.values != 0.0) & (series.steps > first)]
    evidence: dict[str, Any] = {
        "first_step": first, "bad_points": len(bad), "points": total, "finite_points_after": len(finite_after),
        "hidden_as_zero": hidden,
    }  # fmt: skip
    causes = _nonfinite_causes(view, series.steps, first, len(finite_after), len(bad), evidence)
    how = "is logged as 0 with a NaN gradient norm" if hidden else "is NaN or infinite"
    return make_finding(
        f"the loss {how} from step {first} on ({len(bad)} of {total} points)",
        causes,
        "critical",
        first,
        evidence,
        "The curve does not show which tensor became non-finite first.",
    )


def _first_counted_nan(view: JudgedRun) -> tuple[int, int] | None:
    """The interval of steps of the first line that counts NaN iterations beside a finite mean, as Megatron does."""
    counts, loss = view.run.series.get(NAN_COUNT), view.curve("loss")
    if counts is None or loss is None or not (counts.values > 0).any():
        return None
    at = int(np.argmax(counts.values > 0))
    last = int(counts.steps[at])
    if last not in loss.steps:
        return None  # all of the interval is NaN: the loss itself shows it
    before = int(counts.steps[at - 1]) if at else max(0, last - int(loss.interval()))
    return before + 1, last


def _counted_nan_finding(view: JudgedRun, series: Any, bad: Any, first: int, last: int) -> Finding:
    counts = view.run.series[NAN_COUNT]
    iterations = int(counts.values[np.isfinite(counts.values)].sum())
    finite_after = int(np.isfinite(series.values[series.steps > last]).sum())
    evidence: dict[str, Any] = {
        "first_step": first, "first_interval": [first, last], "nan_iterations": iterations, "bad_points": len(bad),
        "points": len(series), "finite_points_after": finite_after,
    }  # fmt: skip
    lines = counts.lines[counts.steps == last]
    if len(lines) and lines[0] >= 0:
        evidence["line"] = int(lines[0])
    causes = _nonfinite_causes(view, series.steps, first, finite_after, len(bad), evidence)
    more = f", and of whole lines from step {int(bad[0])} on" if len(bad) else ""
    text = f"the loss is NaN for the first time between step {first} and step {last}{more} ({iterations} iterations)"
    unknown = "The line is a mean over its finite steps: it does not show which step was the first."
    return make_finding(text, causes, "critical" if len(bad) else "warning", first, evidence, unknown)


def _nonfinite_causes(
    view: JudgedRun, steps: Any, first: int, after: int, bad: int, evidence: dict[str, Any]
) -> list[Cause]:
    scores = {"nonfinite_input": 0.35, "lr_too_high": 0.2, "fp16_overflow": 0.05, "labels_masked": 0.1}
    loss, norm = view.curve("loss"), view.curve("grad_norm")
    before = loss.before(first) if loss is not None else None
    if first <= steps[0]:
        scores.update(labels_masked=0.6, nonfinite_input=0.3, lr_too_high=0.02)
    elif after >= max(2, bad):  # updates went on: only the loss of these batches is undefined
        scores.update(labels_masked=0.75, nonfinite_input=0.3, lr_too_high=0.03)
    elif before is not None and len(before) >= 2:
        rise = float(np.max(before.values[-8:])) / max(float(np.median(before.values)), 1e-9)
        norms = norm.before(first) if norm is not None else None
        growth = 1.0
        if norms is not None and len(norms) >= 2:
            growth = float(np.max(norms.values[-8:])) / max(
                float(np.median(norms.values[:-3] if len(norms) > 6 else norms.values[:1])), 1e-12
            )
        evidence.update(loss_rise_before=round(rise, 2), gradient_growth_before=round(growth, 2))
        early = first < 0.05 * max(view.run.total_steps or 0, view.last_step) or len(before) <= 6
        if lr_jump(view, first) > 2:
            scores.update(lr_jump=0.85)
        elif rise > 1.3 or growth > 8:
            scores.update(lr_too_high=0.75, warmup_missing=0.4 if early and not has_warmup(view) else 0.1)
    scale = view.curve("loss_scale", 3)
    if view.precision == "fp16" and (scale is None or scale.values[-1] <= 0.02 * scale.values.max()):
        scores.update(fp16_overflow=0.85)
    if (view.near_restart(first)) is not None:
        scores.update(weights_damaged=0.5)
    return rank(view, **scores)


def has_warmup(view: JudgedRun) -> bool:
    """Whether the rate rises at the start, or the settings say so; False also where nothing is known."""
    rates = view.curve("lr", 2)
    if rates is not None and rates.values.max() > 0:
        return bool(rates.values[0] < 0.7 * rates.values.max() and np.argmax(rates.values) > 0)
    return bool(view.number("warmup"))


def lr_jump(view: JudgedRun, step: float) -> float:
    """Factor by which the rate rises over one logged point around a step; 1 where it does not."""
    rates = view.curve("lr", 4)
    if rates is None:
        return 1.0
    middle = int(np.searchsorted(rates.steps, step))
    part = rates.values[max(0, middle - 12) : middle + 3]
    if len(part) < 3:
        return 1.0
    ratios = part[1:] / np.maximum(part[:-1], 1e-30)
    at = int(np.argmax(ratios))
    # A warm-up rises too, by a factor that shrinks from point to point.
    return float(ratios[at]) if ratios[at] > 2 and at >= 1 and ratios[at - 1] < 1.5 else 1.0
