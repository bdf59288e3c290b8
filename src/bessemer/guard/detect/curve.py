"""The shape of the loss curve: oscillation, plateau, and validation that rises while training falls."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from bessemer.guard.detect.alarm import Alarm, alarm, fires
from bessemer.guard.detect.block import BLOCK, Block, Record, median, relative, spread, spread_around_line
from bessemer.spec.guard import GuardSpec

LENGTH = 256  # losses in one spectrum
FIRST_BIN = 6  # periods above 42 steps are slow noise as often as oscillation
EVERY = 4  # blocks between two spectra
CHUNKS = 16  # points of a plateau's span
REMEMBERED = 64  # validations


@dataclass
class Oscillation:
    """A loss that swings with one period: most of its variance lies in a narrow band of its spectrum, twice running."""

    guard: GuardSpec
    recent: list[float] = field(default_factory=list)
    blocks: int = 0
    streak: int = 0
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: Block) -> list[Alarm]:
        self.recent = (self.recent + block.losses)[-LENGTH:]
        self.blocks += 1
        if self.blocks % EVERY or len(self.recent) < LENGTH:
            return []
        detect = self.guard.detect
        power, period, swing = band_power(self.recent)
        swings = power > detect.oscillation_power and swing > detect.oscillation_swing
        self.streak = self.streak + 1 if swings else 0
        if not fires(self.active, "oscillation", self.streak >= 2, EVERY):
            return []
        symptom = f"the loss swings by {100 * swing:.0f} % with a period of {period:.1f} steps"
        return alarm("oscillation", block.step, "warning", symptom, 0.8, period=period, swing=swing, power=power)


def band_power(losses: list[float]) -> tuple[float, float, float]:
    """The strongest band's share of the variance, its period in steps, and the swing as a share of the loss."""
    center, limit, n = median(losses), 4 * spread(losses), len(losses)
    x = np.clip(np.asarray(losses) - center, -limit, limit)  # a spike has power at every period
    time = np.arange(n) - (n - 1) / 2
    x = x - x.mean() - time * (x @ time) / (time @ time)
    power = np.abs(np.fft.rfft(x * np.hanning(n))) ** 2
    power[0] = 0.0
    bands = np.convolve(power, np.ones(5), mode="same")
    best = FIRST_BIN + int(np.argmax(bands[FIRST_BIN:]))
    around = slice(best - 2, best + 3)
    frequency = float(np.arange(len(power))[around] @ power[around]) / max(float(power[around].sum()), 1e-30) / n
    swing = 2 * math.sqrt(2) * float(x.std()) / relative(center)
    return float(bands[best] / max(power.sum(), 1e-30)), 1 / max(frequency, 1 / n), swing


@dataclass
class Plateau:
    """A loss that has stopped falling over a long part of the run while the learning rate is still high."""

    guard: GuardSpec
    total_steps: int
    chunk: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)  # medians of the span's chunks
    top_lr: float = 0.0
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: Block) -> list[Alarm]:
        if not block.enough:
            return []
        detect, lr = self.guard.detect, block.accepted[-1]["lr"]
        span = max(detect.plateau_least, detect.plateau_span * self.total_steps)
        self.top_lr = max(self.top_lr, lr)
        self.chunk.append(block.loss)
        if len(self.chunk) < span / CHUNKS / BLOCK:
            return []
        self.levels = [*self.levels, median(self.chunk)][-CHUNKS:]
        self.chunk = []
        if len(self.levels) < CHUNKS:
            return []
        quarter = CHUNKS // 4
        old, new = median(self.levels[:quarter]), median(self.levels[-quarter:])
        fall = (old - new) / relative(old)
        # The error of the difference of two medians of four chunks; where it is large nothing can be said.
        error = 1.2533 * math.sqrt(2 / quarter) * spread_around_line(self.levels) / relative(old)
        flat = abs(fall) + error < detect.plateau_fall and lr >= 0.5 * self.top_lr
        if not fires(self.active, "plateau", flat, CHUNKS):
            return []
        symptom = f"the loss fell by {100 * fall:.2f} % in the last {span:.0f} steps (to {new:.4g})"
        return alarm("plateau", block.step, "note", symptom, 0.7, fall=fall, error=error, steps=int(span))


@dataclass
class Overfitting:
    """Three validations in a row above the best, not falling, while the training loss goes on falling."""

    guard: GuardSpec
    past: list[list[float]] = field(default_factory=list)  # validation loss, training loss
    sources: list[dict[str, float]] = field(default_factory=list)
    active: dict[str, int] = field(default_factory=dict)

    def validation(self, record: Record, training: float | None) -> list[Alarm]:
        if training is None or not math.isfinite(record["loss"]):
            return []
        self.past.append([record["loss"], training])
        self.sources.append(dict(record.get("per_source") or {}))
        best = self.past.index(min(self.past))
        if len(self.past) > REMEMBERED:  # the best one stays, however long ago it was
            drop = 0 if best else 1
            del self.past[drop], self.sources[drop]
            best = self.past.index(min(self.past))
        (lowest, then), after = self.past[best], [pair[0] for pair in self.past[best + 1 :]][-3:]
        # Second differences know no trend: those of pure noise have its variance six times.
        losses = [pair[0] for pair in self.past]
        bends = [c - 2 * b + a for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
        noise = spread(bends or [0.0]) / math.sqrt(6)
        least = self.guard.detect.overfit_rise
        fallen = (then - training) / relative(then)
        risen = len(after) == 3 and min(after) - lowest > max(least * relative(lowest), 3 * noise)
        if not fires(self.active, "overfitting", risen and after[-1] >= after[0] and fallen > least, 3):
            return []
        now, before = self.sources[-1], self.sources[best]
        symptom = f"validation rose from {lowest:.4g} to {after[-1]:.4g} while training fell by {100 * fallen:.1f} %"
        return alarm(
            "overfitting", record["step"], "warning", symptom, 0.85, best=lowest, now=after[-1], training_then=then,
            training_now=training, rise_per_source={key: now[key] - before[key] for key in now if key in before},
        )  # fmt: skip
