"""Rules of the loss curve: its start, spikes, divergence, plateaus, oscillation, and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bessemer.diagnose.rules.causes import make_finding, rank
from bessemer.diagnose.rules.curve import MetricCurve, Outlier, find_cycle, find_outliers, find_period, trend
from bessemer.diagnose.rules.nonfinite import has_warmup, judge_nonfinite, lr_jump
from bessemer.diagnose.rules.view import JudgedRun
from bessemer.run.finding import Cause, Finding

START_MARGIN = 0.3  # nats around ln V at the start
SCALES_OF_START = 0.08  # tolerance of the first loss over a multiple of ln V
HIGH_RATE = 0.03  # of Adam
BACK_WITHIN = 600  # steps: a spike that took longer has cost training something


def judge_loss(view: JudgedRun) -> list[Finding]:
    findings: list[Finding] = []
    if broken := judge_nonfinite(view):
        findings.append(broken)
    start = judge_start(view)
    findings += start
    loss = view.language_loss
    if loss is None or (broken and len(loss) < 16) or any(finding.rule == "labels_masked" for finding in start):
        return findings
    every_point, loss = loss, loss.thinned()
    shape = judge_divergence(view, loss) or judge_stuck(view, loss)
    findings += [shape] if shape else []
    findings += judge_spikes(view, every_point, shape)
    if shape is None:
        findings += [
            finding
            for finding in (judge_oscillation(view, loss), judge_high_rate(view, loss) or judge_plateau(view, loss))
            if finding
        ]
    return findings


# --- the start


def judge_start(view: JudgedRun) -> list[Finding]:
    """The first loss against ln(vocabulary), and losses that are zero."""
    loss = view.language_loss
    if loss is None:
        return []
    zero = loss.values == 0.0
    if zero.mean() > 0.5 and zero[0]:
        evidence = {"zero_points": int(zero.sum()), "points": len(loss)}
        causes = rank(view, labels_masked=0.9, labels_not_shifted=0.1)
        text = "the loss is exactly 0 from the first step on"
        return [make_finding(text, causes, "critical", loss.steps[0], evidence)]
    if zero.mean() > 0.05:
        evidence = {"zero_points": int(zero.sum()), "points": len(loss), "first_step": int(loss.steps[zero][0])}
        norm = view.run.series.get("grad_norm")
        if norm is None or bool(np.isfinite(norm.values).all()):
            text = f"the loss is exactly 0 in {zero.mean():.0%} of the points"
            return [make_finding(text, rank(view, labels_masked=0.85), "critical", loss.steps[zero][0], evidence)]
    return _judge_first_loss(view, loss) or _judge_no_task(view, loss)


def _judge_first_loss(view: JudgedRun, loss: MetricCurve) -> list[Finding]:
    vocabulary = view.number("vocabulary")
    if not vocabulary or vocabulary < 2:
        return []
    first, uniform = float(loss.values[0]), math.log(vocabulary)
    accumulation = view.number("accumulation") or 1.0
    evidence = {"first_loss": round(first, 3), "ln_vocabulary": round(uniform, 3), "accumulation": accumulation}
    ratio = first / uniform
    early = loss.mean_of <= max(1, 0.1 * view.last_step)
    if first > uniform + START_MARGIN and ratio > 1 + SCALES_OF_START:
        unit = accumulation if accumulation > 1 and abs(ratio / accumulation - 1) < SCALES_OF_START / 2 else 0
        whole_number = ratio > 1.8 and abs(ratio / round(ratio) - 1) < 0.03
        lasting = loss.level(0.1) > 0.5 * first or (unit > 1 and loss.level(0.1) > 0.1 * first)
        scaled = 0.9 if unit else 0.45 if whole_number else 0.1
        other = 0.9 if not unit and not whole_number else 0.4
        causes = rank(
            view,
            initial_loss_above_uniform=other if not unit else 0.15,
            loss_summed_over_accumulation=scaled if lasting or unit else 0.2,
            lr_too_high=0.15,
        )
        severity = "critical" if unit or ratio > 1.3 else "warning"
        text = f"the first loss is {first:.3g}, {ratio:.2f} times ln({vocabulary:.0f}) = {uniform:.3g}"
        return [make_finding(text, causes, severity, loss.steps[0], evidence)]
    if accumulation > 1 and early and abs(ratio * accumulation - 1) < SCALES_OF_START:
        causes = rank(view, loss_divided_twice=0.85, labels_not_shifted=0.1)
        text = f"the first loss is {first:.3g}: ln({vocabulary:.0f}) over the accumulation of {accumulation:.0f}"
        return [make_finding(text, causes, "critical", loss.steps[0], evidence)]
    return []


def _judge_no_task(view: JudgedRun, loss: MetricCurve) -> list[Finding]:
    """A loss that falls to almost nothing, on held-out data too."""
    evaluation = view.curve("validation_loss", 1)
    first, last = float(loss.values[0]), loss.level(0.1)
    if first < 0.5 or last > 0.03 * first:
        return []
    held_out = evaluation.level(0.2, least=1) if evaluation is not None else None
    evidence = {"first": first, "last": last, "held_out": held_out}
    if held_out is not None and held_out > max(3 * last, 0.3 * first):
        return []  # memorised, which the rules of validation judge
    sure = 0.85 if held_out is not None else 0.5
    causes = rank(view, labels_not_shifted=sure, epoch_memorised=0.8 - sure if sure < 0.8 else 0.1)
    text = f"the loss falls from {first:.3g} to {last:.2g}" + (
        f", held-out loss to {held_out:.2g}" if held_out is not None else ""
    )
    severity = "critical" if held_out is not None else "warning"
    return [make_finding(text, causes, severity, loss.steps[-1], evidence)]


# --- the shape of the curve


def judge_divergence(view: JudgedRun, loss: MetricCurve) -> Finding | None:
    """A loss whose end is far above its best level."""
    if len(loss) < 16:
        return None
    smooth = loss.smooth(max(2, len(loss) // 40))
    best = int(np.argmin(smooth))
    first, low, end = float(np.median(loss.values[:3])), float(smooth[best]), loss.level(0.1)
    gain, noise = max(first - low, 0.0), max(loss.noise(), 1e-9)
    rise = end - low
    if rise < max(0.2 * gain, 0.04 * abs(low), 4 * noise) or len(loss) - best < 4:
        return None
    above = np.flatnonzero(smooth[best:] > low + max(0.3 * rise, 2 * noise))
    onset = best + int(above[0]) if len(above) else best
    step = int(loss.steps[onset])
    evidence = {"lowest": round(low, 4), "lowest_step": int(loss.steps[best]), "last": round(end, 4), "onset": step}
    causes = _rise_causes(view, loss, step, onset, evidence)
    severity = "critical" if rise > max(0.3 * gain, 0.1 * abs(low)) else "warning"
    text = f"the loss rises from {low:.3g} (step {loss.steps[best]}) to {end:.3g} and stays up, from step {step} on"
    return make_finding(text, causes, severity, step, evidence)


def _rise_causes(
    view: JudgedRun, loss: MetricCurve, step: int, onset: int, evidence: dict[str, Any], recovered: bool = False
) -> list[Cause]:
    scores = {"lr_too_high": 0.5, "diverged": 0.2, "weights_damaged": 0.15, "bad_batch": 0.1}
    if recovered:  # training goes on as before: nothing is lost
        scores = {"lr_too_high": 0.5, "bad_batch": 0.35, "weights_damaged": 0.15}
    early = onset <= max(8, 0.12 * len(loss))
    if early and not has_warmup(view):
        scores.update(lr_too_high=0.6, warmup_missing=0.5)
    high = (peak_rate(view) or 0.0) > HIGH_RATE
    if high:
        scores.update(lr_too_high=0.85)
    jump = lr_jump(view, step)
    at_once = onset >= 2 and _jump_share(loss, onset) > 0.6
    norm = view.curve("grad_norm", 16)
    if norm is not None and len(norm.before(step)) >= 8:
        before = norm.before(step)
        evidence["gradient_growth"] = round(
            float(np.median(norm.since(step).values[:8])) / max(before.level(0.5), 1e-12), 2
        )
    if jump > 2:
        scores.update(lr_jump=0.9, lr_too_high=0.4)
        evidence["lr_factor"] = round(jump, 2)
    restart = view.near_restart(step)
    if restart is not None:
        evidence["restart"] = restart
        state = {"schedule_restarted": 0.85} if jump > 1.5 else {"optimizer_state_lost": 0.7, "weights_damaged": 0.5}
        scores.update(lr_too_high=0.2, **state)
    elif at_once and jump <= 2 and not early and not high and not recovered:
        scores.update(weights_damaged=0.6, lr_too_high=0.4)
    if view.precision == "fp16":
        scores["fp16_overflow"] = 0.3
    return rank(view, **scores)


def _jump_share(loss: MetricCurve, onset: int) -> float:
    """The largest rise between two neighbours around the onset, as a share of the whole rise."""
    around = loss.values[max(0, onset - 6) : onset + 8]
    whole_rise = float(around.max() - np.median(around[:3]))
    return float(np.diff(around).max()) / whole_rise if whole_rise > 0 else 0.0


def judge_stuck(view: JudgedRun, loss: MetricCurve) -> Finding | None:
    """A loss that never falls, or falls along a line: nothing is trained, or too slowly or wildly."""
    if len(loss) < 16:
        return None
    parts = loss.chunks(8)
    first, last, noise = float(np.median(loss.values[:4])), float(parts[-1]), loss.noise()
    fall = (first - last) / max(abs(first), 1e-9)
    error = 2.5 * noise / math.sqrt(max(1, len(loss) // 8)) / max(abs(first), 1e-9)
    norm, rates = view.curve("grad_norm", 4), view.curve("lr", 2)
    evidence: dict[str, Any] = {"first": round(first, 4), "last": round(last, 4), "noise": round(noise, 5)}
    if norm is not None:
        evidence["grad_norm"] = float(np.median(norm.values))
    if rates is not None:
        evidence["lr"] = float(rates.values.max())
    hump = float(np.max(loss.values[: max(4, len(loss) // 4)])) > first * 1.05 + 4 * noise
    if abs(fall) > max(0.005, error):
        return _judge_slow(view, loss, parts, evidence)
    scores = {"weights_frozen": 0.4, "lr_too_low": 0.4, "lr_too_high": 0.2, "plateau": 0.05}
    if norm is not None and float(np.median(norm.values)) < 1e-6:
        scores.update(weights_frozen=0.6, gradient_vanishing=0.5, lr_too_low=0.1)
    if rates is not None and rates.values.max() <= 0:
        scores.update(weights_frozen=0.9)
    steady = norm is not None and float(np.ptp(norm.chunks(8))) < 0.1 * float(np.median(norm.values))
    if steady:
        scores.update(lr_too_high=0.05)
    if trend(loss) < -0.6:  # it does fall, all the time
        scores.update(lr_too_low=0.6, weights_frozen=0.15)
    if hump:
        scores.update(lr_too_high=0.75, weights_frozen=0.05, lr_too_low=0.1)
    peak = peak_rate(view)
    if peak is not None and peak < 2e-6:
        scores.update(lr_too_low=0.7)
    elif peak is not None and peak > HIGH_RATE:
        scores.update(lr_too_high=0.8)
    if view.precision == "bf16" and not hump:
        scores.update(bf16_updates_lost=0.65 if peak is not None and 1e-5 < peak < 1e-3 else 0.3)
    causes = rank(view, **scores)
    text = f"the loss does not fall: {first:.4g} at the start, {last:.4g} after {loss.steps[-1]} steps"
    return make_finding(text, causes, "critical", loss.steps[-1], evidence)


def _judge_slow(view: JudgedRun, loss: MetricCurve, parts: Any, evidence: dict[str, Any]) -> Finding | None:
    """A straight fall that covers little: the rate is too low."""
    rates = view.curve("lr", 2)
    if len(loss) < 32 or (rates is not None and np.argmax(rates.values) > 0.5 * len(rates)):
        return None  # too early to tell, or still warming up
    total = float(parts[0] - parts[-1])
    half = float(parts[0] - parts[len(parts) // 2])
    uniform = math.log(view.number("vocabulary") or 1) or float(loss.values[0])
    if total <= 0 or total > 0.2 * float(parts[0]) or parts[-1] < 0.7 * uniform:
        return None
    straight = half / total < 0.68 and float(loss.noise()) < 0.5 * total
    if not straight:
        return None
    evidence["share_of_fall_in_first_half"] = round(half / total, 2)
    causes = rank(view, lr_too_low=0.8, warmup_missing=0.02, batch_too_large=0.15)
    if view.precision == "bf16":
        causes += rank(view, bf16_updates_lost=0.85 if (peak_rate(view) or 0.0) > 1e-5 else 0.3)
    text = f"the loss falls along a straight line, by {total / parts[0]:.1%} in {loss.steps[-1]} steps"
    return make_finding(text, causes, "warning", loss.steps[-1], evidence)


# --- spikes


def judge_spikes(view: JudgedRun, loss: MetricCurve, shape: Finding | None) -> list[Finding]:
    """Rises that come back, sorted by shape: their own step, building up, or at once with a slow return."""
    reach = max(1, loss.mean_of)
    outliers = find_outliers(loss, 8.0, 0.15 if reach == 1 else 0.06)
    if shape is not None and shape.step is not None:
        outliers = [outlier for outlier in outliers if outlier.step < shape.step - 2 * loss.interval()]
    quick = [outlier for outlier in outliers if not outlier.built and not outlier.left > 0.25]
    slow = [outlier for outlier in outliers if outlier not in quick]
    findings = [_explain_quick(view, loss, quick)] if quick else []
    if slow:
        findings.append(_explain_slow(view, loss, max(slow, key=lambda outlier: outlier.rise), slow))
    return findings


def _explain_quick(view: JudgedRun, loss: MetricCurve, outliers: list[Outlier]) -> Finding:
    largest = max(outliers, key=lambda outlier: outlier.rise)
    norm = view.curve("grad_norm", 16)
    evidence: dict[str, Any] = {
        "steps": [outlier.step for outlier in outliers[:20]], "value": round(largest.value, 4),
        "usual": round(largest.usual, 4), "deviations": round(largest.deviations, 1),
    }  # fmt: skip
    scores = {"bad_batch": 0.7, "lr_too_high": 0.2, "weights_damaged": 0.1}
    if norm is not None:
        factor = norm.at(largest.step) / max(norm.before(largest.step).level(0.5), 1e-12)
        evidence["gradient_factor"] = round(factor, 1)
        scores["bad_batch"] = 0.85 if factor > 3 else 0.6
    period = find_period([outlier.step for outlier in outliers])
    if period:
        evidence["period"] = period
        scores.update(data_ordered=0.5)
    if (peak_rate(view) or 0.0) > HIGH_RATE:
        scores.update(lr_too_high=0.8, bad_batch=0.5)
    elif len(outliers) > max(6, 0.03 * len(loss)) and not period:
        scores.update(lr_too_high=0.45)
    causes = rank(view, **scores)
    times = f"{len(outliers)} times, most at" if len(outliers) > 1 else "at"
    change = f"from {largest.usual:.3g} to {largest.value:.3g}"
    text = f"the loss jumps {change} {times} step {largest.step} and is back at once"
    severity = "warning" if largest.rise > 0.3 or len(outliers) > 2 else "note"
    return make_finding(text, causes, severity, largest.step, evidence)


def _explain_slow(view: JudgedRun, loss: MetricCurve, outlier: Outlier, outliers: list[Outlier]) -> Finding:
    step = outlier.step
    evidence: dict[str, Any] = {
        "steps": [other.step for other in outliers[:20]], "value": round(outlier.value, 4),
        "usual": round(outlier.usual, 4),
        "deviations": round(outlier.deviations, 1), "share_left_after_five_points": round(outlier.left, 2),
    }  # fmt: skip
    back = _steps_until_back(loss, outlier)
    if back is not None:
        evidence["back_after_steps"] = back
    causes = _rise_causes(view, loss, step, outlier.index, evidence, recovered=back is not None)
    built = "builds up" if outlier.built else "jumps"
    text = f"the loss {built} to {outlier.value:.3g} at step {step} (usually {outlier.usual:.3g}) and comes back " + (
        f"within {back} steps" if back is not None else "slowly"
    )
    severity = "critical" if outlier.rise > 1.0 and back is None else "warning" if outlier.rise > 0.25 else "note"
    return make_finding(text, causes, severity, step, evidence)


def _steps_until_back(loss: MetricCurve, outlier: Outlier) -> int | None:
    """Steps after which the loss is back at its level, where healthy training follows that; else None."""
    rest = loss.part(outlier.index)
    if len(rest) < 16:
        return None
    noise = loss.before(outlier.step).part(-64).noise()
    limit = outlier.usual + max(2 * noise, 0.05 * (outlier.value - outlier.usual))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(rest.values[:4096], 5), axis=1)
    below = np.flatnonzero(medians <= limit)
    if not len(below) or rest.level(0.1) > outlier.usual + 2 * noise:
        return None
    at = int(below[0])
    steps = int(rest.steps[at]) - outlier.step
    few = steps <= max(BACK_WITHIN, 10 * loss.interval())
    return steps if few and len(rest) - at >= max(8, at) else None


# --- oscillation, plateau


def judge_oscillation(view: JudgedRun, loss: MetricCurve) -> Finding | None:
    """A cycle that repeats in both halves of the last three quarters."""
    if len(loss) < 96:
        return None
    part = loss.part(len(loss) // 4)
    cycle = find_cycle(part)
    if cycle is None:
        return None
    points, share, size = cycle
    swing, period = size / max(abs(part.level(0.5)), 1e-9), points * loss.interval()
    if swing < 0.05:
        return None
    evidence = {"period_steps": period, "swing": round(swing, 3), "share_of_variance": round(share, 2)}
    causes = rank(view, data_ordered=0.75, lr_too_high=0.3)
    text = f"the loss swings by {swing:.0%} with a period of {period} steps"
    return make_finding(text, causes, "warning", loss.steps[-1], evidence)


def peak_rate(view: JudgedRun) -> float | None:
    rates = view.curve("lr")
    return view.number("lr") or (float(rates.values.max()) if rates is not None else None)


def judge_high_rate(view: JudgedRun, loss: MetricCurve) -> Finding | None:
    """A rate that hardly any language model bears with Adam, and a loss that stops falling early."""
    peak, optimizer = peak_rate(view), str(view.setting("optimizer") or "").lower()
    if peak is None or peak < HIGH_RATE or len(loss) < 48 or any(name in optimizer for name in ("sgd", "muon", "lars")):
        return None
    half = loss.part(len(loss) // 2)
    gain = half.level(0.3, end=False) - half.level(0.3)
    all_gain = max(float(np.median(loss.values[:3])) - half.level(0.3), 1e-9)
    if gain > 0.1 * all_gain:
        return None
    evidence = {"lr": peak, "gain_in_second_half": round(gain, 4), "gain": round(all_gain, 4)}
    causes = rank(view, lr_too_high=0.8, warmup_missing=0.15, plateau=0.1)
    text = f"the loss stays at {half.level(0.3):.3g} since step {half.steps[0]} with a learning rate of {peak:.2g}"
    return make_finding(text, causes, "warning", half.steps[0], evidence)


def judge_plateau(view: JudgedRun, loss: MetricCurve) -> Finding | None:
    """No fall over the second half while the rate is high. A note: it may be all that can be learned."""
    if len(loss) < 64:
        return None
    rates = view.curve("lr", 4)
    half = loss.part(len(loss) // 2)
    fall = (half.level(0.25, end=False) - half.level(0.25)) / max(abs(half.level(0.25)), 1e-9)
    error = 1.5 * half.noise() / math.sqrt(len(half) / 4) / max(abs(half.level(0.25)), 1e-9)
    if abs(fall) + error > 0.01 or abs(trend(half)) > 0.8:
        return None
    if rates is not None and rates.values[-1] < 0.3 * rates.values.max():
        return None
    causes = rank(view, plateau=0.5, lr_too_high=0.35, batch_too_small=0.2, lr_too_low=0.1)
    evidence = {"fall_in_second_half": round(fall, 5), "error": round(error, 5), "level": round(half.level(0.25), 4)}
    text = f"the loss has been flat at {half.level(0.25):.3g} since step {half.steps[0]}"
    return make_finding(text, causes, "note", half.steps[0], evidence)


def judge_gradients(view: JudgedRun) -> list[Finding]:
    """A gradient norm that grows or shrinks by orders of magnitude while the loss is still high."""
    norm, loss = view.curve("grad_norm", 32), view.curve("loss", 16)
    if norm is None or loss is None or view.reinforcement:
        return []
    parts = norm.chunks(10)
    usual, last = float(np.median(parts[1:6])), float(parts[-1])
    evidence = {"usual": usual, "last": last}
    if last > 12 * max(usual, 1e-12) and trend(norm.part(len(norm) // 2)) > 0.6:
        causes = rank(view, gradient_explosion=0.6, lr_too_high=0.5)
        text = f"the gradient norm grows from {usual:.3g} to {last:.3g}"
        return [make_finding(text, causes, "warning", norm.steps[-1], evidence)]
    high = loss.level(0.1) > 0.5 * float(loss.values[0])
    if last < 1e-3 * usual and high and usual > 0:
        causes = rank(view, gradient_vanishing=0.7, weights_frozen=0.3, dead_units=0.2)
        text = f"the gradient norm shrinks from {usual:.3g} to {last:.3g} while the loss stays high"
        return [make_finding(text, causes, "warning", norm.steps[-1], evidence)]
    return []
