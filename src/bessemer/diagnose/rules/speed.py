"""Rules of step times, memory, waiting for data, utilisation and scaling.

Delays under MIN_DELAY_S are left alone: they are the jitter of small steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.diagnose.rules.causes import make_finding, rank
from bessemer.diagnose.rules.curve import Curve, find_level_shift, find_period, trend
from bessemer.diagnose.rules.view import RunView
from bessemer.observe.foreign.series import ForeignRun, Series
from bessemer.run.finding import Finding

MIN_DELAY_S = 0.1
WARM_UP_POINTS = 3  # compilation and caches


def judge_speed(view: RunView) -> list[Finding]:
    times = step_times(view)
    findings = [judge_waiting(view, times), judge_memory(view), judge_utilisation(view)]
    if times is not None and len(times) >= 24:
        findings += [judge_growth(view, times) or judge_shift(view, times), judge_stalls(view, times)]
    return [finding for finding in findings if finding]


def step_times(view: RunView) -> Curve | None:
    """Seconds of a step; from tokens per second where they are not logged, in units of the usual step."""
    times = view.curve("step_s", WARM_UP_POINTS + 5)
    if times is None and (rate := view.curve("tokens_per_s", WARM_UP_POINTS + 5)) is not None:
        batch, context = view.number("batch"), view.number("context")
        positive = rate.values > 0
        tokens = batch * context if batch and context else float(np.median(rate.values))
        series = Series("step_s", rate.steps[positive], tokens / rate.values[positive], rate.steps[positive])
        times = Curve.of(series)
    return times.part(WARM_UP_POINTS) if times is not None else None


def judge_waiting(view: RunView, times: Curve | None) -> Finding | None:
    waits = view.curve("data_wait_s", 8)
    if waits is None or times is None:
        return None
    waits = waits.part(WARM_UP_POINTS)
    wait, step = float(waits.values.mean()), float(times.values.mean())
    share = wait / max(step, wait, 1e-12)
    if share < 0.1 or wait < MIN_DELAY_S / 20:
        return None
    evidence = {"data_wait_s": round(wait, 4), "step_s": round(step, 4), "share": round(share, 3)}
    causes = rank(view, slow_data=0.9, slowed_down=0.1)
    text = f"steps wait for data {share:.0%} of the time ({wait * 1000:.0f} of {step * 1000:.0f} ms)"
    return make_finding(text, causes, "warning", waits.steps[0], evidence)


def judge_stalls(view: RunView, times: Curve) -> Finding | None:
    """Single slow steps, with a period or without."""
    usual = float(np.median(times.values))
    slow = times.values > max(2.0 * usual, usual + MIN_DELAY_S)
    if not slow.any() or slow.mean() > 0.34:
        return None
    lost = float((times.values[slow] - usual).sum() / times.values.sum())
    steps = times.steps[slow]
    # Regular stalls among random ones: the largest tell the period.
    large = times.values > usual + 0.5 * float(np.median(times.values[slow] - usual))
    period = find_period(steps) or find_period(times.steps[large])
    evidence: dict[str, Any] = {
        "usual_s": round(usual, 4), "slow_s": round(float(np.median(times.values[slow])), 4),
        "steps": [int(s) for s in steps[:12]], "share_of_time": round(lost, 3), "period": period,
    }  # fmt: skip
    workers = int(view.number("workers") or 0)
    if period and lost > 0.08:
        bursts = period == workers or (workers == 0 and period <= 4)
        causes = rank(
            view, periodic_stall=0.35 if bursts else 0.85, worker_stall=0.7 if bursts else 0.2, stragglers=0.1
        )
        text = (
            f"every {period} steps one takes {evidence['slow_s']:.3g} s (usually {usual:.3g} s): {lost:.0%} of the time"
        )
        return make_finding(text, causes, "warning", steps[0], evidence)
    if lost > 0.2 and len(steps) >= 4:
        causes = rank(view, stragglers=0.6, slow_data=0.35, periodic_stall=0.2)
        text = f"{len(steps)} steps take {evidence['slow_s']:.3g} s (usually {usual:.3g} s): {lost:.0%} of the time"
        return make_finding(text, causes, "warning", steps[0], evidence)
    return None


def judge_growth(view: RunView, times: Curve) -> Finding | None:
    """Steps that become slower all the time."""
    parts = times.chunks(8)
    growth = float(parts[-1] / max(parts[0], 1e-12))
    steady = bool(np.all(np.diff(parts) > -0.05 * parts[0]))
    largest_share = float(np.diff(parts).max() / max(parts[-1] - parts[0], 1e-12))
    if growth < 1.4 or parts[-1] - parts[0] < MIN_DELAY_S / 4 or not steady or largest_share > 0.5:
        return None
    memory = view.curve("memory_bytes", 8)
    grows = memory is not None and memory.values[-1] > 1.1 * memory.level(0.1, end=False)
    evidence = {"first_s": round(float(parts[0]), 4), "last_s": round(float(parts[-1]), 4), "memory_grows": grows}
    causes = rank(view, step_time_grows=0.8, memory_leak=0.6 if grows else 0.2, slowed_down=0.15)
    text = (
        f"a step takes {parts[-1]:.3g} s at the end, {growth:.1f} times as long as at the start, and grows all the time"
    )
    return make_finding(text, causes, "warning", times.steps[-1], evidence)


def judge_shift(view: RunView, times: Curve) -> Finding | None:
    """A lasting change from one step on."""
    shift = find_level_shift(times)
    if shift is None:
        return None
    at, before, after = shift
    if after < 1.4 * before or after - before < MIN_DELAY_S / 2:
        return None
    evidence = {"before_s": round(before, 4), "after_s": round(after, 4), "step": int(times.steps[at])}
    causes = rank(view, slowed_down=0.7, slow_data=0.2, step_time_grows=0.1)
    text = f"a step takes {after:.3g} s from step {times.steps[at]} on, {before:.3g} s before"
    return make_finding(text, causes, "warning", times.steps[at], evidence)


def judge_memory(view: RunView) -> Finding | None:
    memory = view.curve("memory_bytes", 16)
    if memory is None:
        return None
    settled = memory.part(len(memory) // 5)
    parts = settled.chunks(8)
    growth = float(parts[-1] / max(parts[0], 1.0))
    if growth < 1.2 or trend(settled) < 0.95 or np.diff(parts).max() > 0.5 * (parts[-1] - parts[0]):
        return None
    evidence = {"first_bytes": float(parts[0]), "last_bytes": float(parts[-1]), "growth": round(growth, 2)}
    text = f"memory grows all the time, from {parts[0] / 2**20:.0f} to {parts[-1] / 2**20:.0f} MiB"
    causes = rank(view, memory_leak=0.85, step_time_grows=0.1)
    return make_finding(text, causes, "warning", memory.steps[-1], evidence)


def judge_utilisation(view: RunView) -> Finding | None:
    """A low MFU on an accelerator. Processors have no peak that the number could be compared with."""
    mfu = view.curve("mfu", 8)
    if mfu is None:
        return None
    device = str(view.setting("accelerator") or "").lower()
    value = float(np.median(mfu.values[WARM_UP_POINTS:]))
    on_device = any(name in device for name in ("cuda", "gpu", "h100", "h200", "a100", "b200", "mi300"))
    if not 0 < value < 0.25 or not (on_device or value > 0.03):
        return None
    evidence = {"mfu": round(value, 4), "device": device}
    causes = rank(view, low_mfu=0.7, slow_data=0.3, poor_scaling=0.3 if (view.number("devices") or 1) > 8 else 0.1)
    severity = "warning" if value < 0.15 else "note"
    return make_finding(f"MFU is {value:.1%}", causes, severity, mfu.steps[-1], evidence)


def judge_scaling(one: ForeignRun, many: ForeignRun) -> Finding | None:
    """Throughput of a run on more devices against one on fewer."""
    views = [RunView(one), RunView(many)]
    devices = [view.number("devices") for view in views]
    rates = [view.curve("tokens_per_s", 4) for view in views]
    if devices[0] is None or devices[1] is None or rates[0] is None or rates[1] is None or devices[1] <= devices[0]:
        return None
    before, after = (float(np.median(rate.values[1:])) for rate in (rates[0], rates[1]))
    ideal, gain = devices[1] / devices[0], after / max(before, 1e-9)
    if gain > 0.8 * ideal:
        return None
    evidence = {"devices": devices, "tokens_per_s": [round(before), round(after)], "efficiency": round(gain / ideal, 3)}
    causes = rank(views[1], poor_scaling=0.8, slow_data=0.3, stragglers=0.25)
    text = f"{devices[1]:.0f} devices are {gain:.1f} times as fast as {devices[0]:.0f}, not {ideal:.0f} times"
    return make_finding(text, causes, "warning" if gain < 0.6 * ideal else "note", 0, evidence)
