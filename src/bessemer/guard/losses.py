"""Detectors of the loss curve and the gradient norm: spikes, divergence, exploding or vanishing gradients, oscillation,
plateaus, overfitting.

The reference is the last `window` accepted steps. Blocks that look wrong are held back from it for a limited time; then
they become the new normal, after an alarm if they were worth one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from bessemer.guard.alarm import (
    BLOCK,
    Alarm,
    Record,
    Severity,
    StepBlock,
    debounce,
    log_norm,
    make_alarm,
    median,
    relative_scale,
    robust_std,
    robust_std_around_line,
)
from bessemer.spec.guard import GuardSpec

REARM = 8  # clear blocks before an alarm of the same kind may be raised again
HOLD = 4  # windows after which a raised loss becomes the new normal; drifts of 5 % in 2,000 steps are still detected
TAIL_BLOCKS = 256  # blocks whose largest deviation is remembered: 4,096 steps
LOSS_FLOOR, GRAD_FLOOR = 0.02, 0.25  # smallest scale of a step, as in the judge
LEVEL_FLOOR = 0.005  # smallest scale of a block's median, as a share of the loss


@dataclass
class SpikeDetector:
    """Single steps far above recent ones. The weight of the tails is learnt: Student's t with 4 degrees of freedom
    exceeds 8 robust deviations every 2,000 steps, and four times the largest of 4,096 once in a million."""

    guard: GuardSpec
    key: str  # "loss", or "grad_norm" in logs
    levels: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)  # largest deviation of each block
    center: float = 0.0
    scale: float = 0.0  # 0 until there are enough steps
    limit: float = 0.0
    largest: float = 0.0  # deviation in the running block
    active: dict[str, int] = field(default_factory=dict)

    def step(self, record: Record) -> list[Alarm]:
        """Called with every finite step, including vetoed ones."""
        if not self.scale:
            return []
        by_loss = self.key == "loss"
        rise = (record["loss"] if by_loss else log_norm(record)) - self.center
        z = rise / self.scale
        if z > self.largest:
            self.largest = min(z, 2 * self.limit)  # one spike must not desensitize the detector
        if z <= self.limit or (
            by_loss and rise < self.guard.detect.spike_rise * relative_scale(self.center, self.guard.detect.loss_unit)
        ):
            return []
        if not debounce(self.active, "spike", True, 1):
            return []
        value, usual = record[self.key], self.center if by_loss else math.exp(self.center)
        return make_alarm(
            "spike", record["step"], "note",
            f"{self.key} {value:.4g}, {z:.0f} robust deviations above the usual {usual:.4g}", 0.9,
            value=value, usual=usual, deviations=round(z, 1), limit=round(self.limit, 1), vetoed=record["veto"],
        )  # fmt: skip

    def block(self, block: StepBlock) -> list[Alarm]:
        debounce(self.active, "spike", False, 1)
        if not block.enough:
            return []
        detect, by_loss = self.guard.detect, self.key == "loss"
        self.levels.append(block.loss if by_loss else median(block.log_norms))
        self.spreads.append(block.loss_spread if by_loss else robust_std(block.log_norms))
        if self.scale:
            self.tail.append(self.largest)
        del self.levels[:-8], self.spreads[: -detect.window // BLOCK], self.tail[:-TAIL_BLOCKS]
        self.largest = 0.0
        if len(self.spreads) * BLOCK >= detect.warmup:
            self.center = median(self.levels)
            floor = LOSS_FLOOR * relative_scale(self.center, self.guard.detect.loss_unit) if by_loss else GRAD_FLOOR
            self.scale = max(floor, 1.05 * median(self.spreads))  # 5 %: the bias of 16 values
            sigma = self.guard.loss_sigma if by_loss else self.guard.grad_sigma
            # The largest of few values underestimates the tail: the limit is wider until the memory fills.
            young = (TAIL_BLOCKS / max(8, len(self.tail))) ** 0.25
            self.limit = max(sigma, detect.spike_tail * young * max(self.tail, default=3.0))
        return []


@dataclass
class DivergenceDetector:
    """A loss that rises and stays up: CUSUM over block medians, standardised by the window, and a rise beyond the
    spec's limit and beyond earlier excursions of this run (a high learning rate causes excursions of hundreds of steps,
    which the scale of one window does not show)."""

    guard: GuardSpec
    levels: list[float] = field(default_factory=list)  # the reference
    spreads: list[float] = field(default_factory=list)
    total: float = 0.0  # the CUSUM
    held: list[float] = field(default_factory=list)  # blocks since it left zero
    crest: float = 0.0  # the largest rise since then
    wandered: list[float] = field(default_factory=list)  # earlier crests that came back down
    active: dict[str, int] = field(default_factory=dict)

    def level(self) -> float | None:
        """The training loss now: the median of the last 64 accepted steps."""
        recent = (self.levels[-4:] + self.held)[-4:]
        return median(recent) if len(recent) == 4 else None

    def block(self, block: StepBlock) -> list[Alarm]:
        detect = self.guard.detect
        keep = detect.window // BLOCK
        if not block.enough:
            return []
        if len(self.levels) * BLOCK < detect.warmup:
            self.levels.append(block.loss)
            self.spreads.append(block.loss_spread)
            return []
        center = median(self.levels[-keep // 2 :])
        # The largest of three estimates of a block median's scale, since a window of few blocks can look too quiet.
        expected = 1.2533 * median(self.spreads) / math.sqrt(BLOCK)
        scale = max(
            robust_std_around_line(self.levels),
            expected,
            LEVEL_FLOOR * relative_scale(center, self.guard.detect.loss_unit),
        )
        self.total = max(0.0, self.total + min((block.loss - center) / scale, 6.0) - 1.0)
        if self.total:
            self.held.append(block.loss)
        else:
            self.wandered = [*self.wandered, self.crest][-32:] if self.held else self.wandered
            self.levels += [*self.held, block.loss]
            self.spreads.append(block.loss_spread)
            self.held, self.crest = [], 0.0
        alarms = self._judge(center, block.step)
        if len(self.held) >= HOLD * keep:
            self.levels, self.held, self.total, self.crest = self.held, [], 0.0, 0.0
        del self.levels[:-keep], self.spreads[:-keep]
        return alarms

    def _judge(self, center: float, step: int) -> list[Alarm]:
        detect, lasted = self.guard.detect, BLOCK * len(self.held)
        significant = self.total > detect.divergence_sum and len(self.held) >= 4
        now = median((self.levels[-4:] + self.held)[-4:])
        rise = (now - center) / relative_scale(center, self.guard.detect.loss_unit)
        self.crest = max(self.crest, rise)
        worth = max(detect.divergence_rise, 2 * max(self.wandered, default=0.0))
        limits: dict[Severity, float] = {
            "warning": min(worth, detect.divergence_rollback), "rollback": detect.divergence_rollback,
        }  # fmt: skip
        alarms: list[Alarm] = []
        for severity, least in limits.items():
            if debounce(self.active, severity, significant and rise > least, REARM):
                alarms = make_alarm(
                    "divergence", step, severity,
                    f"the loss has risen by {100 * rise:.1f} % within {lasted} steps and stays up",
                    0.8 if severity == "warning" else 0.95,
                    level=now, reference=center, rise=round(rise, 4), since_step=step - lasted + 1,
                )  # fmt: skip
        return alarms  # the more severe one, if both begin at once


@dataclass
class GradientDetector:
    """A gradient norm that stays far above or below its window. Vetoed steps count as observations but never enter the
    reference: an explosion that the judge vetoes step by step is still an explosion."""

    guard: GuardSpec
    levels: list[float] = field(default_factory=list)  # of the log, accepted steps
    losses: list[float] = field(default_factory=list)
    odd: list[float] = field(default_factory=list)  # consecutive outlier blocks
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: StepBlock) -> list[Alarm]:
        detect = self.guard.detect
        keep = detect.window // BLOCK
        now = median([log_norm(record) for record in block.attempts])
        loss = median([record["loss"] for record in block.attempts])
        ready = len(self.levels) * BLOCK >= detect.warmup
        usual = median(self.levels) if ready else now
        high = now - usual > math.log(detect.gradient_factor)
        # Gradients shrink with the loss when data is memorised: that is no fault.
        low = usual - now > math.log(detect.gradient_vanish) and loss > 0.5 * median(self.losses)
        if (high or low) and len(self.odd) < keep:
            self.odd.append(now)
        elif block.enough:
            self.levels = [*(self.odd if len(self.odd) >= keep else self.levels), now][-keep:]
            self.losses = [*self.losses, loss][-keep:]
            self.odd = []
        alarms = []
        for kind, bad in (("gradient_exploding", high), ("gradient_vanishing", low)):
            if debounce(self.active, kind, bad and len(self.odd) >= 2, REARM):
                alarms += make_alarm(
                    kind, block.step, "warning",
                    f"gradient norm {math.exp(now):.3g}, usually {math.exp(usual):.3g}", 0.9,
                    grad_norm=math.exp(now), usual=math.exp(usual), vetoed=BLOCK - len(block.accepted),
                )  # fmt: skip
        return alarms


LENGTH = 256  # losses in one spectrum
FIRST_BIN = 6  # periods above 42 steps are slow noise as often as oscillation
EVERY = 4  # blocks between two spectra
CHUNKS = 16  # points of a plateau's span
REMEMBERED = 64  # validations


@dataclass
class OscillationDetector:
    """A loss that oscillates: most of its variance lies in a narrow band of its spectrum, in two spectra in a row."""

    guard: GuardSpec
    recent: list[float] = field(default_factory=list)
    blocks: int = 0
    streak: int = 0
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: StepBlock) -> list[Alarm]:
        self.recent = (self.recent + block.losses)[-LENGTH:]
        self.blocks += 1
        if self.blocks % EVERY or len(self.recent) < LENGTH:
            return []
        detect = self.guard.detect
        power, period, swing = band_power(self.recent, detect.loss_unit)
        swings = power > detect.oscillation_power and swing > detect.oscillation_swing
        self.streak = self.streak + 1 if swings else 0
        if not debounce(self.active, "oscillation", self.streak >= 2, EVERY):
            return []
        symptom = f"the loss swings by {100 * swing:.0f} % with a period of {period:.1f} steps"
        return make_alarm("oscillation", block.step, "warning", symptom, 0.8, period=period, swing=swing, power=power)


def band_power(losses: list[float], unit: float | None = None) -> tuple[float, float, float]:
    """The strongest band's share of the variance, its period in steps, and the swing as a share of the loss."""
    center, limit, n = median(losses), 4 * robust_std(losses), len(losses)
    x = np.clip(np.asarray(losses) - center, -limit, limit)  # a spike has power at every period
    time = np.arange(n) - (n - 1) / 2
    x = x - x.mean() - time * (x @ time) / (time @ time)
    power = np.abs(np.fft.rfft(x * np.hanning(n))) ** 2
    power[0] = 0.0
    bands = np.convolve(power, np.ones(5), mode="same")
    best = FIRST_BIN + int(np.argmax(bands[FIRST_BIN:]))
    around = slice(best - 2, best + 3)
    frequency = float(np.arange(len(power))[around] @ power[around]) / max(float(power[around].sum()), 1e-30) / n
    swing = 2 * math.sqrt(2) * float(x.std()) / relative_scale(center, unit)
    return float(bands[best] / max(power.sum(), 1e-30)), 1 / max(frequency, 1 / n), swing


@dataclass
class PlateauDetector:
    """A loss that has stopped falling over a long part of the run while the learning rate is still high."""

    guard: GuardSpec
    total_steps: int
    chunk: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)  # medians of the span's chunks
    top_lr: float = 0.0
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: StepBlock) -> list[Alarm]:
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
        fall = (old - new) / relative_scale(old, self.guard.detect.loss_unit)
        # The error of the difference of two medians of four chunks; if it is large, there is no conclusion.
        error = (
            1.2533
            * math.sqrt(2 / quarter)
            * robust_std_around_line(self.levels)
            / relative_scale(old, self.guard.detect.loss_unit)
        )
        flat = abs(fall) + error < detect.plateau_fall and lr >= 0.5 * self.top_lr
        if not debounce(self.active, "plateau", flat, CHUNKS):
            return []
        symptom = f"the loss fell by {100 * fall:.2f} % in the last {span:.0f} steps (to {new:.4g})"
        return make_alarm("plateau", block.step, "note", symptom, 0.7, fall=fall, error=error, steps=int(span))


@dataclass
class OverfittingDetector:
    """Three validations in a row above the best, not falling, while the training loss keeps falling."""

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
        if len(self.past) > REMEMBERED:  # the best one stays, however old
            drop = 0 if best else 1
            del self.past[drop], self.sources[drop]
            best = self.past.index(min(self.past))
        (lowest, then), after = self.past[best], [pair[0] for pair in self.past[best + 1 :]][-3:]
        # Second differences cancel a trend; those of pure noise have six times its variance.
        losses = [pair[0] for pair in self.past]
        bends = [c - 2 * b + a for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
        noise = robust_std(bends or [0.0]) / math.sqrt(6)
        least = self.guard.detect.overfit_rise
        fallen = (then - training) / relative_scale(then, self.guard.detect.loss_unit)
        risen = len(after) == 3 and min(after) - lowest > max(
            least * relative_scale(lowest, self.guard.detect.loss_unit), 3 * noise
        )
        if not debounce(self.active, "overfitting", risen and after[-1] >= after[0] and fallen > least, 3):
            return []
        now, before = self.sources[-1], self.sources[best]
        symptom = f"validation rose from {lowest:.4g} to {after[-1]:.4g} while training fell by {100 * fallen:.1f} %"
        return make_alarm(
            "overfitting", record["step"], "warning", symptom, 0.85, best=lowest, now=after[-1], training_then=then,
            training_now=training, rise_per_source={key: now[key] - before[key] for key in now if key in before},
        )  # fmt: skip
