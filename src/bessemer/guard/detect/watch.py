"""The watch over a run, on the host: every detector in one place, fed with each step's record.

Most work is done once per 16 steps, so a step costs some microseconds. It only reports: others decide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from bessemer.guard.detect.alarm import BLOCK, Alarm, Record, Severity, StepBlock, alarm, fires
from bessemer.guard.detect.layers import LayerDetector
from bessemer.guard.detect.losses import (
    DivergenceDetector,
    GradientDetector,
    OscillationDetector,
    OverfittingDetector,
    PlateauDetector,
    SpikeDetector,
)
from bessemer.guard.detect.machine import MemoryDetector, PlanGapDetector, SettingsDetector, SpeedDetector
from bessemer.spec.guard import GuardSpec

KEPT = (
    "step", "loss", "grad_norm", "lr", "veto", "tokens_per_s", "step_s", "data_wait_s", "memory_bytes", "rank_step_s",
)  # fmt: skip
SEARCH = 4  # times as many overflows of fp16 in a row: from 65,536 down to 1 a loss scale takes 16 steps
FIXED = ("guard", "key", "limit_bytes", "total_steps", "hosts")  # of a detector, from the spec and the machine


class Detectors:
    """`memory_limit_bytes` is what the device (or host, on a CPU) has; None leaves memory unwatched. `hosts` are those
    of the ranks, where there are several."""

    def __init__(
        self, spec: GuardSpec, memory_limit_bytes: int | None, total_steps: int, hosts: Sequence[str] = ()
    ) -> None:
        self.hosts = list(hosts)
        self.gap: PlanGapDetector | None = None  # where there is something to compare with
        self.spec, self.memory_limit_bytes, self.total_steps = spec, memory_limit_bytes, total_steps
        self._begin()

    def _begin(self) -> None:
        spec = self.spec
        self._nonfinite = 0  # in a row
        self._active: dict[str, int] = {}
        self._attempts: list[Record] = []  # finite steps since the last evaluation
        self.settings, self.overfitting, self.looks = (
            SettingsDetector(spec),
            OverfittingDetector(spec),
            LayerDetector(spec),
        )
        self.spike, self.grad_spike = SpikeDetector(spec, "loss"), SpikeDetector(spec, "grad_norm")
        self.divergence, self.gradient, self.oscillation = (
            DivergenceDetector(spec),
            GradientDetector(spec),
            OscillationDetector(spec),
        )
        self.plateau, self.speed = PlateauDetector(spec, self.total_steps), SpeedDetector(spec, self.hosts)
        self.memory = MemoryDetector(spec, self.memory_limit_bytes, self.total_steps)

    def step(self, record: Record, clocks: tuple[float, float] | None = None) -> list[Alarm]:
        """Once per attempted step, in order. `clocks` are time.time() and time.monotonic()."""
        found = self.settings.step(record, clocks)
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            return found + self._not_finite(record)
        self._nonfinite = 0
        found += self.spike.step(record) + self.grad_spike.step(record)
        found += self.gap.step(record) if self.gap else []
        self._attempts.append(record)
        if len(self._attempts) == BLOCK:
            found += self._evaluate()
        return found

    def _not_finite(self, record: Record) -> list[Alarm]:
        self._nonfinite += 1
        # With fp16 some overflows of the gradient are how the loss scale is found.
        expected = "loss_scale" in record and math.isfinite(record["loss"])
        lasting = self._nonfinite == self.spec.max_vetoes * (SEARCH if expected else 1)
        new = not expected and fires(self._active, "nonfinite", True, 1)
        if not (new or lasting):
            return []
        which = [key for key in ("loss", "grad_norm") if not math.isfinite(record[key])]
        symptom = " and ".join(which) + f" not finite, {self._nonfinite} steps in a row"
        severity: Severity = "rollback" if lasting else "warning"
        return alarm("nonfinite", record["step"], severity, symptom, 1.0, which=which, in_a_row=self._nonfinite)

    def _evaluate(self) -> list[Alarm]:
        block, self._attempts = StepBlock(self._attempts), []
        fires(self._active, "nonfinite", False, 1)
        return [
            *self.gradient.block(block), *self.spike.block(block), *self.grad_spike.block(block),
            *self.divergence.block(block), *self.oscillation.block(block), *self.plateau.block(block),
            *self.speed.block(block), *self.memory.block(block),
        ]  # fmt: skip

    def validation(self, record: Record) -> list[Alarm]:
        """With the record of an evaluation inside the run."""
        return self.overfitting.validation(record, self.divergence.level())

    def inside(self, step: int, look: dict[str, Any]) -> list[Alarm]:
        """With what `LayerStats` saw at a step."""
        return self.looks.look(step, look, self.settings.lr or 0.0)

    def reopen(self, reason: str) -> None:
        """Start anew: a known change (`reason`, for the reader) makes the past a bad reference. After a rollback the
        same trouble is then reported again, which the ladder needs in order to climb."""
        self._begin()

    def _detectors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if hasattr(value, "active")}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if nothing had happened: JSON, 50 kB, with 80 layers looked at 250."""
        detectors = {
            name: {key: value for key, value in vars(detector).items() if key not in FIXED}
            for name, detector in self._detectors().items()
        }
        attempts = [{key: record[key] for key in KEPT if key in record} for record in self._attempts]
        own = {"attempts": attempts, "nonfinite": self._nonfinite, "active": self._active}
        copied: dict[str, Any] = json.loads(json.dumps({"detectors": detectors, **own}))
        return copied

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        state = json.loads(json.dumps(state))
        self._attempts, self._nonfinite, self._active = state["attempts"], state["nonfinite"], state["active"]
        for name, detector in self._detectors().items():
            vars(detector).update(state["detectors"][name])
        self.settings.offset_s = None  # the steady clock of another process starts elsewhere
