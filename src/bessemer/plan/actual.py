"""Compares a run with its plan: predicted and measured numbers, and the likely reason of a gap beyond the error bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bessemer.plan.expect import BAR, ExpectedRun
from bessemer.run.directory import Run
from bessemer.run.finding import Finding
from bessemer.run.journal import last_records, to_number
from bessemer.spec.quantity import human_bytes, human_time

WARM_UP = 8  # first steps, which compile, fill caches and ramp up clocks
LEAST = 16  # steps that a comparison needs
LONG = 3.0  # times the median: an interrupted step
# Limits beyond which a reading counts as a reason.
CLOCK, BUSY, OTHERS_BYTES = 0.65, 0.85, 1 << 30  # an H200 in a training step is at 0.71 to 0.77 of its highest clock
OTHERS_BUSY = {"cpu": 0.25, "cuda": 0.75}  # a GPU run uses little of its host
EXPECTED, RECENT = "expected.json", 1024  # file of the predictions; steps to compare


@dataclass(frozen=True)
class ActualRun:
    """Measurements of the steps after warm-up. `own_s` is the median step without waiting for data; `jumps_s` is what
    interrupted steps add to the mean."""

    steps: int
    step_s: float
    own_s: float
    wait_s: float
    jumps_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: int


@dataclass(frozen=True)
class HostLoad:
    """Load of the machine by other processes, and its state. None: unknown."""

    others_busy: float | None = None  # share of the host's cores that other processes use
    clock: float | None = None  # share of the highest clock
    device_busy: float | None = None  # share of the time
    others_bytes: int | None = None  # of the device's memory
    retries: int | None = None  # of the GPU's allocator after freeing cached memory

    @property
    def held_up(self) -> str:
        """The outside cause that makes a run no measure of its machine; usually empty."""
        if self.retries:
            return "memory fragmentation"
        allowed = OTHERS_BUSY["cpu" if self.retries is None else "cuda"]
        loaded = (self.others_busy or 0.0) > allowed or (self.others_bytes or 0) > OTHERS_BYTES
        return "other load" if loaded else ""


@dataclass(frozen=True)
class ComparisonRow:
    """One number: predicted and measured. `ratio` is measured over predicted."""

    name: str
    expected: float | None
    actual: float
    words: tuple[str, str]

    @property
    def ratio(self) -> float | None:
        return self.actual / self.expected if self.expected else None


def measure_steps(records: Iterable[dict[str, Any]], skip: int = WARM_UP) -> ActualRun | None:
    """From the step records of the training loop; None if there are too few."""
    keys = ("step_s", "data_wait_s", "tokens_per_s", "mfu", "memory_bytes")
    read = [[to_number(record.get(key)) for key in keys] for record in records][skip:]
    rows = [[float(value) for value in row if value is not None] for row in read]
    rows = [row for row in rows if len(row) == len(keys) and row[0] > 0]
    if len(rows) < LEAST:
        return None
    total_s = sum(row[0] for row in rows)
    busy = [max(0.0, row[0] - row[1]) for row in rows]
    middle = median(busy)
    jumps = sum(seconds - middle for seconds in busy if seconds > LONG * middle)
    return ActualRun(
        steps=len(rows),
        step_s=total_s / len(rows),
        own_s=middle,
        wait_s=sum(row[1] for row in rows) / len(rows),
        jumps_s=jumps / len(rows),
        tokens_per_s=sum(row[2] * row[0] for row in rows) / total_s,
        mfu=sum(row[3] * row[0] for row in rows) / total_s,
        memory_bytes=int(max(row[4] for row in rows)),
    )


def compare(expected: ExpectedRun, measured: ActualRun) -> list[ComparisonRow]:
    """Memory, tokens/s, utilisation and the time of all steps."""
    time_s = expected.total_steps * measured.step_s
    pairs = (
        ("memory", expected.memory_bytes, measured.memory_bytes, human_bytes),
        ("tokens/s", expected.tokens_per_s, measured.tokens_per_s, lambda rate: f"{rate:,.0f}"),
        ("MFU", expected.mfu, measured.mfu, lambda share: f"{share:.1%}"),
        ("time", expected.time_s, time_s, human_time),
    )
    return [
        ComparisonRow(name, plan, run, ("-" if plan is None else text(plan), text(run)))  # type: ignore[operator]
        for name, plan, run, text in pairs
    ]


def comparison_lines(expected: ExpectedRun, measured: ActualRun) -> list[str]:
    lines = [f"{'':<10}{'plan':>12}{'run':>12}{'run/plan':>10}"]
    for row in compare(expected, measured):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.name:<10}{row.words[0]:>12}{row.words[1]:>12}{ratio:>10}".rstrip())
    bar = f"the plan's bar is {expected.bar:.0%}; " if expected.bar is not None else ""
    lines.append(f"{bar}{expected.basis}")
    if expected.withheld and expected.withheld != expected.basis:
        lines.append(f"withheld: {expected.withheld}")
    return lines


def comparison_line(expected: ExpectedRun, measured: ActualRun) -> str:
    """The comparison in one line, with the plan's number after each measured one if there is one."""
    words = [
        f"{row.name} {row.words[1]}" + (f" (plan {row.words[0]})" if row.expected is not None else "")
        for row in compare(expected, measured)
    ]
    return ", ".join(words) + (f"; withheld of the plan: {expected.withheld}" if expected.withheld else "")


def comparison_json(expected: ExpectedRun, measured: ActualRun) -> dict[str, Any]:
    rows = compare(expected, measured)
    numbers = {row.name: {"plan": row.expected, "run": row.actual, "ratio": row.ratio} for row in rows}
    facts = {"error_bar": expected.bar, "basis": expected.basis, "steps": measured.steps}
    return {**numbers, **facts, **({"withheld": expected.withheld} if expected.withheld else {})}


def compare_run(run: Run) -> tuple[ExpectedRun, ActualRun] | None:
    """Prediction and measurement from a run folder, also during the run. None if either is missing."""
    try:
        expected = ExpectedRun.from_json((run.folder / EXPECTED).read_text())
    except (OSError, ValueError, TypeError):  # missing, or written by another version
        return None
    last = last_records(run.steps_path, RECENT)
    measured = measure_steps(last, skip=WARM_UP if len(last) < RECENT else 0)
    return (expected, measured) if measured else None


def speed_gap(expected: ExpectedRun, measured: ActualRun) -> float | None:
    """Measured over predicted step time if the gap is beyond the error bar; else None."""
    if expected.step_s is None or expected.bar is None:
        return None
    ratio = measured.step_s / expected.step_s
    return ratio if abs(ratio - 1) > expected.bar else None


def memory_gap(expected: ExpectedRun, measured: ActualRun) -> float | None:
    if not expected.memory_bytes:
        return None
    ratio = measured.memory_bytes / expected.memory_bytes
    return ratio if abs(ratio - 1) > BAR * expected.memory_error else None


def find_gaps(expected: ExpectedRun, measured: ActualRun, look: Callable[[], HostLoad]) -> dict[str, Finding]:
    """A finding for each number beyond its error bar, by event name. `look` reads the host load, only if speed is
    off."""
    results = {}
    if (ratio := speed_gap(expected, measured)) is not None:
        results["plan_speed"] = _speed_finding(expected, measured, look(), ratio)
    if (ratio := memory_gap(expected, measured)) is not None:
        assert expected.memory_bytes is not None
        more = "more" if ratio > 1 else "less"
        symptom = (
            f"{abs(ratio - 1):.0%} {more} memory than planned: {human_bytes(measured.memory_bytes)} instead of "
            f"{human_bytes(expected.memory_bytes)}"
        )
        cause = "something besides the step holds memory, or the estimate is wrong for this model"
        fix = f"{'check what else is loaded' if ratio > 1 else 'none'}; the next plan uses the ratio"
        evidence = {"plan_bytes": expected.memory_bytes, "run_bytes": measured.memory_bytes, "ratio": round(ratio, 3)}
        results["plan_memory"] = Finding(symptom, evidence, cause, 0.4, fix)
    return results


def _speed_finding(expected: ExpectedRun, measured: ActualRun, load: HostLoad, ratio: float) -> Finding:
    assert expected.tokens_per_s is not None and expected.bar is not None
    rates = f"{measured.tokens_per_s:,.0f} tokens/s instead of {expected.tokens_per_s:,.0f}"
    evidence: dict[str, Any] = {
        "plan_step_s": round(expected.step_s or 0.0, 5), "run_step_s": round(measured.step_s, 5),
        "ratio": round(ratio, 3), "bar": round(expected.bar, 3), "data_wait_s": round(measured.wait_s, 5),
        "long_steps_s": round(measured.jumps_s, 5),
    }  # fmt: skip
    evidence |= {key: value for key, value in vars(load).items() if value is not None}
    if ratio < 1:
        symptom = f"{1 / ratio - 1:.0%} faster than planned: {rates} (bar {expected.bar:.0%})"
        return Finding(
            symptom,
            evidence,
            "the plan was too pessimistic for this machine",
            0.5,
            "none; the next plan uses the ratio",
        )
    reason, cause, confidence, fix = likely_reason(expected, measured, load)
    likely = f"; likely {reason}: {cause}" if reason else f"; {cause}"
    symptom = f"{ratio - 1:.0%} slower than planned: {rates} (bar {expected.bar:.0%}){likely}"
    return Finding(symptom, evidence | {"reason": reason}, cause, confidence, fix)


def likely_reason(expected: ExpectedRun, measured: ActualRun, load: HostLoad) -> tuple[str, str, float, str]:
    """(short name, sentence, confidence, fix) for a slow run: the first reason that explains half of the gap, or that
    the machine reports."""
    lost = max(1e-9, measured.step_s - (expected.step_s or 0.0))
    reasons: Sequence[tuple[bool, str, str, float, str]] = (
        (
            2 * measured.wait_s >= lost, "data wait",
            f"steps wait {measured.wait_s / measured.step_s:.0%} of their time for data", 0.9,
            "prepare the data first (bessemer data prepare), or use faster storage",
        ),
        (
            2 * measured.jumps_s >= lost, "recompile",
            f"some steps take over {LONG:g} times the median: layers are recompiled, or the host pauses", 0.7,
            "keep sizes the same (packed rows of one length), or write compile: off and compare",
        ),
        (
            load.held_up == "memory fragmentation", "memory fragmentation",
            f"the allocator freed its cache and retried {load.retries} times", 0.8,
            "lower budget.micro_batch, and leave PYTORCH_ALLOC_CONF at expandable_segments:True",
        ),
        (
            load.held_up == "other load", "other load",
            "other processes use this host or device", 0.7, "look at what else runs there (top, nvidia-smi)",
        ),
        (
            load.clock is not None and load.clock < CLOCK, "clock",
            f"the clock is at {load.clock or 0.0:.0%} of its highest: heat, a power limit or a saving mode", 0.6,
            "look at temperature and power limits (nvidia-smi -q -d CLOCK,POWER)",
        ),
        (
            load.device_busy is not None and load.device_busy < BUSY, "host",
            f"the device is busy only {load.device_busy or 0.0:.0%} of the time: the host launches work too slowly",
            0.6, "raise budget.micro_batch or write compile: block; `bessemer train --profile` shows where time goes",
        ),
    )  # fmt: skip
    for applies, reason, cause, confidence, fix in reasons:
        if applies:
            return reason, cause, confidence, fix
    cause = "no known reason explains it: the plan is wrong for this machine"
    return "", cause, 0.3, "the next plan on this machine uses the measured ratio"
