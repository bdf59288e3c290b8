"""Rules of the learning rate, its schedule, the warm-up, the batch, precision, and what a restart restored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bessemer.diagnose.rules.causes import make_finding, rank
from bessemer.diagnose.rules.curve import MetricCurve
from bessemer.diagnose.rules.loss import has_warmup
from bessemer.diagnose.rules.view import JudgedRun
from bessemer.run.finding import Finding

SMALL_SCALE = 16
MEMORISED = 0.25  # of the first loss, after more than one pass over the data
OVER = 0.012  # of the peak rate: the schedule is over


def judge_rates(view: JudgedRun) -> list[Finding]:
    findings = [judge_schedule_end(view), judge_schedule_length(view), judge_warmup(view), judge_batch(view)]
    findings += [judge_loss_scale(view), *judge_restarts(view)]
    return [finding for finding in findings if finding]


def judge_schedule_end(view: JudgedRun) -> Finding | None:
    """A rate of almost zero while the run goes on."""
    rates = view.curve("lr", 8)
    if rates is None or rates.values.max() <= 0:
        return None
    peak, end = float(rates.values.max()), view.run.total_steps or view.last_step
    alive = np.flatnonzero(rates.values > OVER * peak)
    last_alive = int(rates.steps[alive[-1]])
    wasted = (end - last_alive) / max(1, end)
    over = rates.values[alive[-1] + 1 :]
    # A cosine or linear decay is below 1.2 % of its peak over its last 1 to 7 %.
    if not len(over) or wasted < 0.12 or len(over) < 3:
        return None
    evidence = {"peak": peak, "last_useful_step": last_alive, "end": end, "share_without_rate": round(wasted, 3)}
    causes = rank(view, schedule_too_short=0.9)
    text = f"the learning rate is almost zero from step {last_alive} on: {wasted:.0%} of the run is wasted"
    severity = "critical" if wasted > 0.4 else "warning"
    return make_finding(text, causes, severity, last_alive, evidence)


def judge_schedule_length(view: JudgedRun) -> Finding | None:
    """A decay that is far from its end when the run is."""
    rates, total = view.curve("lr", 16), view.run.total_steps
    if rates is None or not total or view.last_step < 0.97 * total or rates.values.max() <= 0:
        return None
    peak_index = int(np.argmax(rates.values))
    peak, last = float(rates.values[peak_index]), float(rates.values[-1])
    tail = rates.values[peak_index:]
    falls = len(tail) > 8 and last < 0.995 * peak and bool(np.mean(np.diff(tail) <= 1e-12) > 0.95)
    warming = peak_index >= len(rates) - 2 and rates.values[0] < 0.5 * peak
    if not (falls and last > 0.35 * peak) and not warming:
        return None
    evidence = {
        "peak": peak,
        "last": last,
        "share_of_peak": round(last / peak, 3),
        "steps": total,
        "warming_up": warming,
    }
    causes = rank(view, schedule_too_long=0.85 if not warming else 0.6)
    if warming:
        text = f"the learning rate is still rising at the last step ({last:.2g})"
    else:
        text = f"the run ends with the learning rate at {last / peak:.0%} of its peak, though it decays"
    return make_finding(text, causes, "warning", rates.steps[-1], evidence)


def judge_warmup(view: JudgedRun) -> Finding | None:
    """Damage in the first steps: the loss climbs above its start, or gradients are far larger than later."""
    loss = view.language_loss
    if loss is None or len(loss) < 24 or loss.mean_of > 0.02 * view.last_step:
        return None
    early = max(6, len(loss) // 8)
    first, noise = float(np.median(loss.values[:2])), loss.part(early).noise()
    top_index = int(np.argmax(loss.values[:early]))
    top = float(loss.values[top_index])
    last = loss.level(0.1)
    rates = view.curve("lr", 2)
    short = rates is not None and has_warmup(view)
    if top < first + max(0.12 * abs(first), 8 * noise) or top_index < 1:
        return None
    evidence: dict[str, Any] = {
        "first": round(first, 3),
        "highest": round(top, 3),
        "step": int(loss.steps[top_index]),
        "last": round(last, 3),
    }
    recovered = last < first - 0.1 * abs(first)
    start = float(rates.values[0] / rates.values.max()) if rates is not None and rates.values.max() > 0 else None
    if start is not None:
        evidence["first_lr_over_peak"] = round(start, 3)
    warm = 0.75 if recovered and not short else 0.4
    causes = rank(view, warmup_missing=warm, lr_too_high=1.05 - warm)
    text = f"the loss rises from {first:.3g} to {top:.3g} in the first {loss.steps[top_index]} steps"
    severity = "warning" if top < 2 * first else "critical"
    return make_finding(text, causes, severity, loss.steps[top_index], evidence)


def judge_batch(view: JudgedRun) -> Finding | None:
    """Noise that is large against the loss and what it gains. A note, unless gains have stopped."""
    loss = view.language_loss
    if loss is None or len(loss) < 64:
        return None
    end = loss.part(len(loss) // 2)
    level, noise = end.level(0.5), end.noise() * math.sqrt(loss.mean_of)
    epochs = view.curve("epoch", 2)
    repeated = epochs is not None and epochs.values.max() > 1
    if repeated and level < MEMORISED * float(np.median(loss.values[:4])):
        end = loss.part(len(loss) // 8, len(loss) // 2)  # before the rows were memorised: noise over almost nothing
        level, noise = end.level(0.5), end.noise() * math.sqrt(loss.mean_of)
    share = noise / max(abs(level), 1e-9)
    gain = end.level(0.25, end=False) - end.level(0.25)
    evidence: dict[str, Any] = {
        "noise_of_a_step": round(noise, 4),
        "level": round(level, 4),
        "share": round(share, 3),
        "gain_in_second_half": round(gain, 4),
    }
    batch, context = view.number("batch"), view.number("context")
    if batch:
        evidence["batch"] = batch
    if loss.mean_of > 1:
        evidence["scaled_by"] = f"sqrt({loss.mean_of}): each point is a mean of {loss.mean_of} steps"
    if share > 0.13:
        causes = rank(view, batch_too_small=0.75, lr_too_high=0.25, data_ordered=0.15)
        scaled = f", estimated from means of {loss.mean_of}" if loss.mean_of > 1 else ""
        text = f"single steps vary by {share:.0%} of the loss{scaled}"
        return make_finding(text, causes, "note" if share < 0.25 else "warning", end.steps[0], evidence)
    falling = gain > 0.05 * level
    if share < 0.004 and falling and view.last_step < 300 and batch and batch * (context or 1) > 2**14:
        causes = rank(view, batch_too_large=0.6, lr_too_low=0.35)
        text = f"single steps vary by only {share:.2%} of the loss, which still falls after {view.last_step} steps"
        return make_finding(text, causes, "note", end.steps[0], evidence)
    return None


def judge_loss_scale(view: JudgedRun) -> Finding | None:
    """fp16: a scale that collapses. Halvings in the first steps are normal: the scale starts too high on purpose."""
    scale, skipped = view.curve("loss_scale", 8), view.curve("skipped_steps", 4)
    if scale is None or view.precision in ("bf16", "fp32"):
        return None
    # A scale this small leaves no room, whenever it was reached.
    settled = scale if scale.level(0.2) <= SMALL_SCALE else scale.part(min(24, len(scale) // 4))
    if not len(settled) or settled.values.max() <= 1:
        return None
    top = int(np.argmax(settled.values))
    last = float(settled.values[-1])
    halvings = math.log2(max(float(settled.values[top]) / max(last, 1e-12), 1.0))
    share = float(skipped.values[-1] - skipped.values[0]) / max(1, view.last_step) if skipped is not None else 0.0
    if halvings < 5 and share < 0.2:
        return None
    evidence = {
        "highest": float(settled.values[top]),
        "last": last,
        "halvings": round(halvings, 1),
        "skipped_share": round(share, 3),
    }
    causes = rank(view, fp16_overflow=0.85, lr_too_high=0.3, nonfinite_input=0.15)
    text = f"the fp16 loss scale falls from {settled.values[top]:.0f} to {last:.3g}"
    severity = "critical" if last <= 1 else "warning"
    return make_finding(text, causes, severity, settled.steps[top], evidence)


# --- restarts


def judge_restarts(view: JudgedRun) -> list[Finding]:
    """The rate and the loss around each restart; a rate that starts again without one."""
    findings = []
    rates = view.curve("lr", 8)
    if rates is not None and (finding := _judge_rate_restart(view, rates)):
        findings.append(finding)
    loss = view.language_loss
    restarted = {finding.step for finding in findings}
    for start in view.restarts:
        if loss is not None and start not in restarted and (finding := _judge_loss_at_restart(view, loss, start)):
            findings.append(finding)
    return findings


def _judge_rate_restart(view: JudgedRun, rates: MetricCurve) -> Finding | None:
    """The rate falls back to the warm-up, or rises again after it has decayed."""
    if "restart" in str(view.setting("schedule")).lower() or rates.values.max() <= 0:
        return None
    peak, highest = float(rates.values.max()), np.maximum.accumulate(rates.values)
    ratios = rates.values[1:] / np.maximum(rates.values[:-1], 1e-30)
    for i in np.flatnonzero((ratios > 1.15) | (ratios < 0.3)) + 1:
        if i < 2:
            continue
        before, now, step = float(rates.values[i - 1]), float(rates.values[i]), int(rates.steps[i])
        at_restart = view.near_restart(step) is not None
        earlier = float(rates.values[i - 2])
        up = now > 2 * before and now - before > 0.1 * peak and before < 1.2 * earlier  # a warm-up slows down
        steady = now > 1.15 * before and at_restart and before < 0.98 * highest[i - 1]
        down = at_restart and now < 0.3 * before and len(rates) - i > 4 and rates.values[i:].max() > 2 * now
        if not (up or steady or down):
            continue
        evidence = {"step": step, "before": before, "after": now, "restart": at_restart}
        named = "schedule_restarted" if at_restart or down else "lr_jump"
        other = "lr_jump" if named == "schedule_restarted" else "schedule_restarted"
        causes = rank(view, **{named: 0.85, other: 0.3})
        text = f"the learning rate goes from {before:.2g} to {now:.2g} at step {step}" + (
            ", at a restart" if at_restart else ""
        )
        return make_finding(text, causes, "warning", step, evidence)
    return None


def _judge_loss_at_restart(view: JudgedRun, loss: MetricCurve, start: int) -> Finding | None:
    before, after = loss.before(start), loss.since(start)
    if len(before) < 8 or len(after) < 8:
        return None
    usual, noise = float(np.median(before.values[-8:])), max(before.part(-32 if len(before) > 32 else 0).noise(), 1e-9)
    first = float(np.median(after.values[:4]))
    later = float(np.median(after.values[:16]))
    evidence = {"restart": start, "before": round(usual, 4), "after": round(first, 4), "noise": round(noise, 5)}
    if first > usual + max(4 * noise, 0.05 * abs(usual)):
        causes = rank(view, optimizer_state_lost=0.7, weights_damaged=0.3, schedule_restarted=0.2)
        text = f"the loss rises from {usual:.3g} to {first:.3g} at the restart of step {start}"
        return make_finding(text, causes, "warning", start, evidence)
    if later < usual - max(3 * noise, 0.06 * abs(usual)):
        causes = rank(view, data_repeated_at_resume=0.75, epoch_memorised=0.3)
        text = f"the loss falls from {usual:.3g} to {later:.3g} at the restart of step {start}"
        return make_finding(text, causes, "warning", start, evidence)
    return None
