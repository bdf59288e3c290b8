"""The gradient noise scale that a run has measured, and the batch ramp that follows from it.

McCandlish et al. 2018: small batches of b tokens and the large one of B tokens that contains them give unbiased
estimates of the squared gradient |G|^2 and of the noise S of one token. B_simple = S / |G|^2, a proxy of the batch
above which more tokens in a step save few steps. Both are averaged before they are divided. It is small at first and
grows while the loss falls, so that a ramp spends fewer tokens on early steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.run.journal import Record, to_number
from bessemer.spec.load import load_spec
from bessemer.spec.quantity import human_count

WINDOWS = 12  # parts of a run, over each of which the noise scale is averaged
LEAST = 8  # measurements


def split_noise(small: float, small_square: float, large: float, large_square: float) -> tuple[float, float]:
    """(|G|^2, S) from the squared gradients of a small batch of tokens and of the large one that contains it."""
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return large_square - noise / large, noise


@dataclass(frozen=True)
class NoiseWindow:
    """The noise scale of some steps, in tokens; infinite if the gradient does not stand out from the noise."""

    first: int
    last: int
    measured: int
    scale: float
    batch: float  # tokens of a step
    tokens: float  # read by the run up to the middle of the window


def noise_windows(records: Iterable[Record], windows: int = WINDOWS) -> list[NoiseWindow]:
    """Windows of equally many measurements. Empty with fewer than 8 of them."""
    rows = [r for r in records if to_number(r.get("noise")) is not None and r.get("veto") is None]
    if len(rows) < LEAST:
        return []
    size = max(LEAST, math.ceil(len(rows) / windows))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(parts) > 1 and len(parts[-1]) < LEAST:
        parts[-2:] = [parts[-2] + parts[-1]]
    return [_window(part) for part in parts]


def _window(rows: Sequence[Record]) -> NoiseWindow:
    def mean(key: str) -> float:
        return sum(float(row[key]) for row in rows) / len(rows)

    signal = mean("gradient_square")
    scale = mean("noise") / signal if signal > 0 else math.inf
    middle = rows[len(rows) // 2]
    return NoiseWindow(
        rows[0]["step"], rows[-1]["step"], len(rows), max(0.0, scale), mean("step_tokens"), float(middle["tokens"])
    )


def ramp(windows: Sequence[NoiseWindow], batch: int, longest: int) -> list[tuple[int, int]]:
    """Batches that double as soon as the noise scale has reached the next size, as (first step, tokens of a step). The
    tokens at which they do are those of the measured run; the steps are those of a run that has the ramp."""
    changes, size, step, read = list[tuple[int, int]](), batch, 0, 0.0
    for window in windows:
        while 2 * size <= min(longest, window.scale):
            step += max(1, round((window.tokens - read) / size)) if window.tokens > read else 0
            read, size = max(read, window.tokens), 2 * size
            if changes and changes[-1][0] == step:
                changes.pop()
            changes.append((step, size))
    return changes


@dataclass(frozen=True)
class BatchRamp:
    """What a run has measured, and the changes that follow."""

    run: str
    windows: list[NoiseWindow]
    batch: int  # of the first step
    changes: list[tuple[int, int]]

    def lines(self) -> list[str]:
        lines = ["steps            noise scale  batch"]
        for w in self.windows:
            steps = f"{w.first:,}-{w.last:,}"
            scale = human_count(round(w.scale)) if math.isfinite(w.scale) else "no end"
            lines.append(f"{steps:<16} {scale:>11}  {human_count(round(w.batch))}")
        if not self.changes:
            return [*lines, f"no larger batch pays: the noise scale stays below {human_count(2 * self.batch)} tokens"]
        entries = ", ".join(f"{{from_step: {step}, batch: {size}}}" for step, size in self.changes)
        return [
            *lines, "for another run like it, with as many tokens:",
            f"budget: {{batch: {self.batch}, batch_changes: [{entries}]}}",
            "schedule: {unit: tokens, batch_rule: sqrt}   # batch_rule: linear with sgd",
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run, "batch": self.batch, "windows": [vars(window) for window in self.windows],
            "batch_changes": [{"from_step": step, "batch": size} for step, size in self.changes],
        }  # fmt: skip


def ramp_of_run(run: Run, first: int | None, longest: int | None) -> BatchRamp:
    """The ramp from the measurements of a run, from batches of `first` tokens (a quarter of the run's) to `longest`
    (eight times the run's). UserError if it has too few."""
    windows = noise_windows(run.metrics())
    if not windows:
        raise UserError(
            f"{run.folder}: has measured its noise scale fewer than {LEAST} times: train with observe.noise_every: 10 "
            "and two micro-batches or more in a step"
        )
    context = load_spec(run.folder / "spec.yaml").data.context
    row = context if isinstance(context, int) else 1
    batch = round(windows[0].batch)
    start = max(row, (first or batch // 4) // row * row)
    return BatchRamp(run.name, windows, start, ramp(windows, start, longest or 8 * batch))
