"""What changed in the steps before an anomaly: data, learning rate, batch size, spec, machine, restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from bessemer.data.stream import BatchStream
from bessemer.run.journal import number
from bessemer.train.job import Job
from bessemer.trial.case import Scene

STEPS = 50
KINDS = {
    "started", "spec_changed", "lock_taken", "guard_reopened", "guard_gave_way", "digits_may_differ", "rollback",
    "optimizer_fallback", "checkpoint_passed_over", "save_failed", "excluded", "alarm",
}  # fmt: skip
Event = Mapping[str, Any]


def what_changed(job: Job, scene: Scene, events: Sequence[Event] = (), steps: int = STEPS) -> list[str]:
    """One line for each change in the last `steps` steps, in their order."""
    first = max(0, scene.step - steps)
    found = [*_rates(job, scene, first), *_batches(job, scene, first), *_happened(events, first, scene.step)]
    if isinstance(job.stream, BatchStream):
        found += _data(job.stream, scene.step, first)
    return [line for _, line in sorted(found, key=lambda entry: entry[0])]


def _rates(job: Job, scene: Scene, first: int) -> Iterator[tuple[int, str]]:
    records = [*scene.history, {"step": scene.step, "lr": scene.lr}]
    for last, record in pairwise(record for record in records if number(record.get("lr"))):
        step, before, rate = int(record["step"]), float(last["lr"]), float(record["lr"])
        planned = job.lr(step)
        as_planned = abs(rate / planned - 1) < 0.01
        growing = as_planned and step <= job.schedule.warmup
        if step >= first and not 0.67 <= rate / before <= 1.5 and not growing:
            remark = "" if as_planned else f"; the schedule says {planned:.3g}"
            line = f"learning rate {before:.3g} -> {rate:.3g} (x{rate / before:.3g}{remark})"
            yield step, f"step {step}: {line}"


def _batches(job: Job, scene: Scene, first: int) -> Iterator[tuple[int, str]]:
    steps = job.stream.steps
    for last, phase in pairwise(steps.batch_phases):
        if first <= phase.from_step <= scene.step:
            yield phase.from_step, f"step {phase.from_step}: batch size {last.rows} -> {phase.rows} sequences"
    for segment in steps.segments[1:]:
        if first <= segment.from_step <= scene.step:
            line = f"step {segment.from_step}: the data goes on at position {segment.position} (a skip)"
            yield segment.from_step, line


def _data(stream: BatchStream, step: int, first: int) -> Iterator[tuple[int, str]]:
    """Phases, new epochs, and a step whose sources are not dealt as in the steps before."""
    numbers = range(first, step + 1)
    ranges = [stream.steps.range(k) for k in numbers]
    positions = np.concatenate([np.arange(*span) for span in ranges])
    at_step = np.repeat(np.array(numbers), [stop - start for start, stop in ranges])
    sources, _, epochs = stream.order.resolve(positions)
    for k, phase in enumerate(stream.order.phases):
        inside = at_step[positions >= phase.start]
        if k and inside.size and positions[0] < phase.start:
            shares = zip(phase.mixture.names, phase.mixture.counts, strict=True)
            words = ", ".join(f"{name} {count / phase.mixture.block:.1%}" for name, count in shares)
            yield int(inside[0]), f"step {inside[0]}: data phase {k + 1} begins ({words})"
    for s, name in enumerate(stream.names):
        mine = sources == s
        if not mine.any():
            continue
        epoch, here = epochs[mine], at_step[mine]
        for k in np.flatnonzero(np.diff(np.maximum.accumulate(epoch))).tolist():
            yield int(here[k + 1]), f"step {here[k + 1]}: epoch {epoch[k + 1] + 1} of source {name} begins"
        now, before = mine[at_step == step], mine[at_step < step]
        if before.size:
            usual = float(before.mean())
            noise = float(np.sqrt(max(usual * (1 - usual), 1 / before.size) / now.size))
            if abs(now.mean() - usual) > 4 * noise:
                line = f"step {step}: {now.mean():.0%} of the rows are of source {name}, {usual:.0%} before"
                yield step, line


def _happened(events: Sequence[Event], first: int, last: int) -> Iterator[tuple[int, str]]:
    """Events of these kinds. Some have no step: they belong to the one that the events before them had reached."""
    reached, starts = 0, [event for event in events if event.get("kind") == "started"]
    for event in events:
        reached = int(number(event.get("step")) or reached)
        if event.get("kind") in KINDS and first <= reached <= last:
            yield reached, f"step {reached}: {_told(event, starts)}"


def _told(event: Event, starts: Sequence[Event]) -> str:
    kind = str(event["kind"])
    if kind == "spec_changed":
        changes = dict(event.get("changes") or {})
        return "the spec changed: " + "; ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())
    if kind != "started":
        return f"{kind.replace('_', ' ')}: {event.get('reason', '')}".rstrip(": ")
    at = next(k for k, start in enumerate(starts) if start is event)
    words = f"started on {event.get('device', '?')}"
    if event.get("resumed_from"):
        words += f" from {event['resumed_from']}"
    if at == 0:
        return words
    before = starts[at - 1]
    for key in ("versions", "machine", "host"):
        old, new = before.get(key), event.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            # Measured rates differ at every start; what the machine is does not.
            words += "".join(
                f"; {name} {old[name]} -> {value}"
                for name, value in new.items()
                if name in old and old[name] != value and not isinstance(value, Mapping)
            )
        elif old != new:
            words += f"; {key} {old} -> {new}"
    return words
