"""The height of the loss and of the gradient norm: single spikes, lasting rises, gradients that vanish or explode.

The reference is the last `window` accepted steps. Blocks that look wrong are held back from it, but not for ever: in
the end they are the new normal (an alarm has said so if it was worth one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bessemer.guard.detect.alarm import Alarm, Severity, alarm, fires
from bessemer.guard.detect.block import BLOCK, Block, Record, log_norm, median, relative, spread, spread_around_line
from bessemer.spec.guard import GuardSpec

REARM = 8  # clear blocks before an alarm of the same kind may come again
HOLD = 4  # windows after which a raised loss is taken for the new normal: drifts of 5 % in 2,000 steps are still seen
TAIL_BLOCKS = 256  # memory of how far single steps stray: 4,096 steps
LOSS_FLOOR, GRAD_FLOOR = 0.02, 0.25  # smallest scale of a step, as in the judge
LEVEL_FLOOR = 0.005  # smallest scale of a block's median, as a share of the loss


@dataclass
class Spike:
    """Steps far above anything seen lately. How heavy the tails are is learnt: Student's t with 4 degrees of freedom
    passes 8 robust deviations every 2,000 steps, and four times the largest of 4,096 once in a million."""

    guard: GuardSpec
    key: str  # "loss", or "grad_norm" in logs
    levels: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)  # largest deviation of each block
    center: float = 0.0
    scale: float = 0.0  # 0 until enough was seen
    limit: float = 0.0
    largest: float = 0.0  # deviation in the running block
    active: dict[str, int] = field(default_factory=dict)

    def step(self, record: Record) -> list[Alarm]:
        """With every finite step, vetoed ones too."""
        if not self.scale:
            return []
        by_loss = self.key == "loss"
        rise = (record["loss"] if by_loss else log_norm(record)) - self.center
        z = rise / self.scale
        if z > self.largest:
            self.largest = min(z, 2 * self.limit)  # one spike may not deafen the detector
        if z <= self.limit or (by_loss and rise < self.guard.detect.spike_rise * relative(self.center)):
            return []
        if not fires(self.active, "spike", True, 1):
            return []
        value, usual = record[self.key], self.center if by_loss else math.exp(self.center)
        return alarm(
            "spike", record["step"], "note",
            f"{self.key} {value:.4g}, {z:.0f} robust deviations above the usual {usual:.4g}", 0.9,
            value=value, usual=usual, deviations=round(z, 1), limit=round(self.limit, 1), vetoed=record["veto"],
        )  # fmt: skip

    def block(self, block: Block) -> list[Alarm]:
        fires(self.active, "spike", False, 1)
        if not block.enough:
            return []
        detect, by_loss = self.guard.detect, self.key == "loss"
        self.levels.append(block.loss if by_loss else median(block.log_norms))
        self.spreads.append(block.loss_spread if by_loss else spread(block.log_norms))
        if self.scale:
            self.tail.append(self.largest)
        del self.levels[:-8], self.spreads[: -detect.window // BLOCK], self.tail[:-TAIL_BLOCKS]
        self.largest = 0.0
        if len(self.spreads) * BLOCK >= detect.warmup:
            self.center = median(self.levels)
            floor = LOSS_FLOOR * relative(self.center) if by_loss else GRAD_FLOOR
            self.scale = max(floor, 1.05 * median(self.spreads))  # 5 %: the bias of 16 values
            sigma = self.guard.loss_sigma if by_loss else self.guard.grad_sigma
            # The largest of few values says little of the tail: until the memory fills, more room is left.
            young = (TAIL_BLOCKS / max(8, len(self.tail))) ** 0.25
            self.limit = max(sigma, detect.spike_tail * young * max(self.tail, default=3.0))
        return []


@dataclass
class Divergence:
    """A loss that rises and stays up: CUSUM over block medians, standardised by the window, and a rise beyond the
    spec's and beyond what this run has wandered by before (a high learning rate makes it wander for hundreds of
    steps, which no scale taken from one window shows)."""

    guard: GuardSpec
    levels: list[float] = field(default_factory=list)  # the reference
    spreads: list[float] = field(default_factory=list)
    total: float = 0.0  # the CUSUM
    held: list[float] = field(default_factory=list)  # blocks since it left zero
    crest: float = 0.0  # the largest rise since then
    wandered: list[float] = field(default_factory=list)  # earlier crests that came to nothing
    active: dict[str, int] = field(default_factory=dict)

    def level(self) -> float | None:
        """The training loss now: the median of the last 64 accepted steps."""
        recent = (self.levels[-4:] + self.held)[-4:]
        return median(recent) if len(recent) == 4 else None

    def block(self, block: Block) -> list[Alarm]:
        detect = self.guard.detect
        keep = detect.window // BLOCK
        if not block.enough:
            return []
        if len(self.levels) * BLOCK < detect.warmup:
            self.levels.append(block.loss)
            self.spreads.append(block.loss_spread)
            return []
        center = median(self.levels[-keep // 2 :])
        # Three estimates of a block median's scale; the largest, since a window of few blocks can look too quiet.
        expected = 1.2533 * median(self.spreads) / math.sqrt(BLOCK)
        scale = max(spread_around_line(self.levels), expected, LEVEL_FLOOR * relative(center))
        self.total = max(0.0, self.total + min((block.loss - center) / scale, 6.0) - 1.0)
        if self.total:
            self.held.append(block.loss)
        else:
            self.wandered = [*self.wandered, self.crest][-32:] if self.held else self.wandered
            self.levels += [*self.held, block.loss]
            self.spreads.append(block.loss_spread)
            self.held, self.crest = [], 0.0
        found = self._judge(center, block.step)
        if len(self.held) >= HOLD * keep:
            self.levels, self.held, self.total, self.crest = self.held, [], 0.0, 0.0
        del self.levels[:-keep], self.spreads[:-keep]
        return found

    def _judge(self, center: float, step: int) -> list[Alarm]:
        detect, lasted = self.guard.detect, BLOCK * len(self.held)
        significant = self.total > detect.divergence_sum and len(self.held) >= 4
        now = median((self.levels[-4:] + self.held)[-4:])
        rise = (now - center) / relative(center)
        self.crest = max(self.crest, rise)
        worth = max(detect.divergence_rise, 2 * max(self.wandered, default=0.0))
        limits: dict[Severity, float] = {
            "warning": min(worth, detect.divergence_rollback), "rollback": detect.divergence_rollback,
        }  # fmt: skip
        found = []
        for severity, least in limits.items():
            if fires(self.active, severity, significant and rise > least, REARM):
                found = alarm(
                    "divergence", step, severity,
                    f"the loss has risen by {100 * rise:.1f} % within {lasted} steps and stays up",
                    0.8 if severity == "warning" else 0.95,
                    level=now, reference=center, rise=round(rise, 4), since_step=step - lasted + 1,
                )  # fmt: skip
        return found  # the graver one, if both begin at once


@dataclass
class Gradient:
    """A gradient norm that stays far above or below its window. Vetoed steps count as what is seen, never as the
    reference: an explosion that the judge vetoes step by step is one all the same."""

    guard: GuardSpec
    levels: list[float] = field(default_factory=list)  # of the log, accepted steps
    losses: list[float] = field(default_factory=list)
    odd: list[float] = field(default_factory=list)  # blocks out of line, in a row
    active: dict[str, int] = field(default_factory=dict)

    def block(self, block: Block) -> list[Alarm]:
        detect = self.guard.detect
        keep = detect.window // BLOCK
        now = median([log_norm(record) for record in block.attempts])
        loss = median([record["loss"] for record in block.attempts])
        ready = len(self.levels) * BLOCK >= detect.warmup
        usual = median(self.levels) if ready else now
        high = now - usual > math.log(detect.gradient_factor)
        # Gradients shrink with the loss when data is learnt by heart: that is no fault.
        low = usual - now > math.log(detect.gradient_vanish) and loss > 0.5 * median(self.losses)
        if (high or low) and len(self.odd) < keep:
            self.odd.append(now)
        elif block.enough:
            self.levels = [*(self.odd if len(self.odd) >= keep else self.levels), now][-keep:]
            self.losses = [*self.losses, loss][-keep:]
            self.odd = []
        found = []
        for kind, bad in (("gradient_exploding", high), ("gradient_vanishing", low)):
            if fires(self.active, kind, bad and len(self.odd) >= 2, REARM):
                found += alarm(
                    kind, block.step, "warning",
                    f"gradient norm {math.exp(now):.3g}, usually {math.exp(usual):.3g}", 0.9,
                    grad_norm=math.exp(now), usual=math.exp(usual), vetoed=BLOCK - len(block.accepted),
                )  # fmt: skip
        return found
