"""A run beside its plan: what was said, what is measured, and for a gap beyond the error bar the likely reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bessemer.plan.expect import BAR, ExpectedRun
from bessemer.run.directory import Finding, Run
from bessemer.run.journal import number
from bessemer.spec.quantity import human_bytes, human_time

WARM_UP = 8  # first steps of a start, which compile, fill caches and find their clocks
LEAST = 16  # steps that a comparison needs
LONG = 3.0  # times the median: a step that something interrupted
# Of a reading beyond which it counts as a reason.
CLOCK, BUSY, OTHERS_BYTES = 0.65, 0.85, 1 << 30  # an H200 in a training step is at 0.71 to 0.77 of its highest clock
OTHERS_BUSY = {"cpu": 0.25, "cuda": 0.75}  # a GPU leaves most of its host to others
EXPECTED, RECENT = "expected.json", 1024  # of a run: the plan's numbers; steps that are compared with them


@dataclass(frozen=True)
class ActualRun:
    """Of the steps after the first few. `own_s` is without waiting for data, at the median step; `jumps_s` is what
    steps that take many times as long add to each."""

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
    """What the machine says of itself. None: it does not."""

    others_busy: float | None = None  # share of the host's cores that other processes use
    clock: float | None = None  # of its highest
    device_busy: float | None = None  # share of the time
    others_bytes: int | None = None  # of the device's memory
    retries: int | None = None  # of the GPU's allocator, which had to give memory back first

    @property
    def held_up(self) -> str:
        """What makes a run no measure of its machine; mostly nothing."""
        if self.retries:
            return "memory fragmentation"
        allowed = OTHERS_BUSY["cpu" if self.retries is None else "cuda"]
        loaded = (self.others_busy or 0.0) > allowed or (self.others_bytes or 0) > OTHERS_BYTES
        return "other load" if loaded else ""


@dataclass(frozen=True)
class ComparisonRow:
    """One number: what was said and what is. `ratio` is measured over said."""

    name: str
    expected: float | None
    actual: float
    words: tuple[str, str]

    @property
    def ratio(self) -> float | None:
        return self.actual / self.expected if self.expected else None


def actual(records: Iterable[dict[str, Any]], skip: int = WARM_UP) -> ActualRun | None:
    """From a start's step records, as the loop writes them; None before there are enough."""
    keys = ("step_s", "data_wait_s", "tokens_per_s", "mfu", "memory_bytes")
    read = [[number(record.get(key)) for key in keys] for record in records][skip:]
    rows = [[float(value) for value in row if value is not None] for row in read]
    rows = [row for row in rows if len(row) == len(keys) and row[0] > 0]
    if len(rows) < LEAST:
        return None
    seconds = sum(row[0] for row in rows)
    own = [max(0.0, row[0] - row[1]) for row in rows]
    middle = median(own)
    jumps = sum(one - middle for one in own if one > LONG * middle)
    return ActualRun(
        steps=len(rows),
        step_s=seconds / len(rows),
        own_s=middle,
        wait_s=sum(row[1] for row in rows) / len(rows),
        jumps_s=jumps / len(rows),
        tokens_per_s=sum(row[2] * row[0] for row in rows) / seconds,
        mfu=sum(row[3] * row[0] for row in rows) / seconds,
        memory_bytes=int(max(row[4] for row in rows)),
    )


def side_by_side(expected: ExpectedRun, found: ActualRun) -> list[ComparisonRow]:
    """Memory, tokens a second, utilisation and the time of all steps."""
    time_s = expected.total_steps * found.step_s
    pairs = (
        ("memory", expected.memory_bytes, found.memory_bytes, human_bytes),
        ("tokens/s", expected.tokens_per_s, found.tokens_per_s, lambda rate: f"{rate:,.0f}"),
        ("MFU", expected.mfu, found.mfu, lambda share: f"{share:.1%}"),
        ("time", expected.time_s, time_s, human_time),
    )
    return [
        ComparisonRow(name, said, is_now, ("-" if said is None else words(said), words(is_now)))  # type: ignore[operator]
        for name, said, is_now, words in pairs
    ]


def comparison_lines(expected: ExpectedRun, found: ActualRun) -> list[str]:
    lines = [f"{'':<10}{'plan':>12}{'run':>12}{'run/plan':>10}"]
    for row in side_by_side(expected, found):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.name:<10}{row.words[0]:>12}{row.words[1]:>12}{ratio:>10}".rstrip())
    bar = f"the plan's bar is {expected.bar:.0%}; " if expected.bar is not None else ""
    lines.append(f"{bar}{expected.basis}")
    if expected.withheld and expected.withheld != expected.basis:
        lines.append(f"withheld: {expected.withheld}")
    return lines


def comparison_line(expected: ExpectedRun, found: ActualRun) -> str:
    """The same in one line: what is known of the plan stands beside each number, what is not is left out."""
    words = [
        f"{row.name} {row.words[1]}" + (f" (plan {row.words[0]})" if row.expected is not None else "")
        for row in side_by_side(expected, found)
    ]
    return ", ".join(words) + (f"; withheld of the plan: {expected.withheld}" if expected.withheld else "")


def comparison_json(expected: ExpectedRun, found: ActualRun) -> dict[str, Any]:
    rows = side_by_side(expected, found)
    numbers = {row.name: {"plan": row.expected, "run": row.actual, "ratio": row.ratio} for row in rows}
    known = {"error_bar": expected.bar, "basis": expected.basis, "steps": found.steps}
    return {**numbers, **known, **({"withheld": expected.withheld} if expected.withheld else {})}


def compare_run(run: Run) -> tuple[ExpectedRun, ActualRun] | None:
    """From a run's folder, also while it goes: the plan, and its last steps. None where either is missing."""
    try:
        expected = ExpectedRun.from_json((run.folder / EXPECTED).read_text())
    except (OSError, ValueError, TypeError):  # none, or of another version
        return None
    last: deque[dict[str, Any]] = deque(run.metrics(), maxlen=RECENT)
    skip = WARM_UP if len(last) < RECENT else 0
    found = actual(last, skip)
    return (expected, found) if found else None


def speed_gap(expected: ExpectedRun, found: ActualRun) -> float | None:
    """Run over plan, of a step's time, where that is beyond the bar; else None."""
    if expected.step_s is None or expected.bar is None:
        return None
    ratio = found.step_s / expected.step_s
    return ratio if abs(ratio - 1) > expected.bar else None


def memory_gap(expected: ExpectedRun, found: ActualRun) -> float | None:
    if not expected.memory_bytes:
        return None
    ratio = found.memory_bytes / expected.memory_bytes
    return ratio if abs(ratio - 1) > BAR * expected.memory_error else None


def findings(expected: ExpectedRun, found: ActualRun, look: Callable[[], HostLoad]) -> dict[str, Finding]:
    """One for each number that is beyond its bar, by what it is of; `look` is asked only if speed is."""
    told = {}
    if (ratio := speed_gap(expected, found)) is not None:
        told["plan_speed"] = _slow_or_fast(expected, found, look(), ratio)
    if (ratio := memory_gap(expected, found)) is not None:
        assert expected.memory_bytes is not None
        more = "more" if ratio > 1 else "less"
        symptom = (
            f"{abs(ratio - 1):.0%} {more} memory than planned: {human_bytes(found.memory_bytes)} instead of "
            f"{human_bytes(expected.memory_bytes)}"
        )
        cause = "something beside a step holds memory, or the estimate is off for this model"
        fix = "the ratio is kept for this machine; look at what else is loaded" if ratio > 1 else "nothing; it is kept"
        evidence = {"plan_bytes": expected.memory_bytes, "run_bytes": found.memory_bytes, "ratio": round(ratio, 3)}
        told["plan_memory"] = Finding(symptom, evidence, cause, 0.4, fix)
    return told


def _slow_or_fast(expected: ExpectedRun, found: ActualRun, around: HostLoad, ratio: float) -> Finding:
    assert expected.tokens_per_s is not None and expected.bar is not None
    rates = f"{found.tokens_per_s:,.0f} tokens/s instead of {expected.tokens_per_s:,.0f}"
    evidence: dict[str, Any] = {
        "plan_step_s": round(expected.step_s or 0.0, 5), "run_step_s": round(found.step_s, 5),
        "ratio": round(ratio, 3), "bar": round(expected.bar, 3), "data_wait_s": round(found.wait_s, 5),
        "long_steps_s": round(found.jumps_s, 5),
    }  # fmt: skip
    evidence |= {key: value for key, value in vars(around).items() if value is not None}
    if ratio < 1:
        symptom = f"{1 / ratio - 1:.0%} faster than planned: {rates} (bar {expected.bar:.0%})"
        return Finding(
            symptom, evidence, "the plan was too careful for this machine", 0.5, "nothing; the ratio is kept"
        )
    reason, cause, confidence, fix = likely_reason(expected, found, around)
    likely = f"; likely {reason}: {cause}" if reason else f"; {cause}"
    symptom = f"{ratio - 1:.0%} slower than planned: {rates} (bar {expected.bar:.0%}){likely}"
    return Finding(symptom, evidence | {"reason": reason}, cause, confidence, fix)


def likely_reason(expected: ExpectedRun, found: ActualRun, around: HostLoad) -> tuple[str, str, float, str]:
    """Of a slow run: (in two words, in a sentence, how sure, what to do). The first that explains half of the gap, or
    that the machine itself admits."""
    lost = max(1e-9, found.step_s - (expected.step_s or 0.0))
    seen: Sequence[tuple[bool, str, str, float, str]] = (
        (
            2 * found.wait_s >= lost, "data wait",
            f"steps wait {found.wait_s / found.step_s:.0%} of their time for data", 0.9,
            "prepare the data first (bessemer data prepare), or use faster storage",
        ),
        (
            2 * found.jumps_s >= lost, "recompile",
            f"some steps take over {LONG:g} times the usual: layers are compiled again, or the host pauses", 0.7,
            "keep sizes the same (packed rows of one length), or write compile: off and compare",
        ),
        (
            around.held_up == "memory fragmentation", "memory fragmentation",
            f"the allocator gave memory back and asked again {around.retries} times", 0.8,
            "lower budget.micro_batch, and leave PYTORCH_ALLOC_CONF at expandable_segments:True",
        ),
        (
            around.held_up == "other load", "other load",
            "other processes use this host or device", 0.7, "look at what else runs there (top, nvidia-smi)",
        ),
        (
            around.clock is not None and around.clock < CLOCK, "clock",
            f"the clock is at {around.clock or 0.0:.0%} of its highest: heat, a power limit or a saving mode", 0.6,
            "look at temperature and power limits (nvidia-smi -q -d CLOCK,POWER)",
        ),
        (
            around.device_busy is not None and around.device_busy < BUSY, "host",
            f"the device is busy only {around.device_busy or 0.0:.0%} of the time: the host starts its work too slowly",
            0.6, "raise budget.micro_batch or write compile: block; `bessemer train --profile` shows where time goes",
        ),
    )  # fmt: skip
    for true, reason, cause, confidence, fix in seen:
        if true:
            return reason, cause, confidence, fix
    cause = "nothing that was looked at explains it: the plan is off for this machine"
    return "", cause, 0.3, "the ratio is kept for this machine, and the next plan counts with it"
