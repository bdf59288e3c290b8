"""Runs all detectors on the host, fed with each step's record. They only report; the ladder decides.

Most work is done once per 16 steps, so a step costs a few microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from bessemer.guard.alarm import BLOCK, Alarm, Record, Severity, StepBlock, debounce, make_alarm
from bessemer.guard.alignment import POLICIES, AlignmentDetector
from bessemer.guard.answers import JudgedAnswer
from bessemer.guard.hacking import HackingDetector
from bessemer.guard.layer_stats import LayerDetector
from bessemer.guard.losses import (
    DivergenceDetector,
    GradientDetector,
    OscillationDetector,
    OverfittingDetector,
    PlateauDetector,
    SpikeDetector,
)
from bessemer.guard.machine import MemoryDetector, PlanGapDetector, SettingsDetector, SpeedDetector
from bessemer.spec.guard import GuardSpec

SAVED_KEYS = (
    "step", "loss", "grad_norm", "lr", "veto", "tokens_per_s", "step_s", "data_wait_s", "memory_bytes", "rank_step_s",
)  # fmt: skip
FP16_SEARCH = 4  # times max_vetoes overflows are allowed: a loss scale falls from 65,536 to 1 in 16 steps
FIXED = (
    "guard",
    "key",
    "limit_bytes",
    "total_steps",
    "hosts",
    "objective",
    "judges",
)  # fields of detectors that are not state


class Detectors:
    """`memory_limit_bytes` is the memory of the device (of the host, on a CPU); None turns its detector off. `hosts`
    are those of the ranks if there are several, `judges` the metrics of rewards that measure the true goal."""

    def __init__(
        self, spec: GuardSpec, memory_limit_bytes: int | None, total_steps: int, hosts: Sequence[str] = (),
        objective: str = "", judges: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.hosts = list(hosts)
        judges = tuple(judges if spec.alignment.judge is None else map("reward_{}".format, spec.alignment.judge))
        # A known change of data or batch size is no reason to forget how answers were at first.
        self.alignment = AlignmentDetector(spec, objective, judges)
        self.hacking = HackingDetector(spec, judges)
        self.judges_loss = objective not in POLICIES  # whose loss is near zero and of either sign
        self.plan_gap: PlanGapDetector | None = None  # set if there is a plan to compare with
        self.spec, self.memory_limit_bytes, self.total_steps = spec, memory_limit_bytes, total_steps
        self._begin()

    def _begin(self) -> None:
        spec = self.spec
        self._nonfinite = 0  # consecutive steps
        self._active: dict[str, int] = {}
        self._attempts: list[Record] = []  # finite steps since the last evaluation
        self.settings, self.overfitting = SettingsDetector(spec), OverfittingDetector(spec)
        self.looks, self.divergence = LayerDetector(spec), DivergenceDetector(spec)
        self.spike, self.grad_spike = SpikeDetector(spec, "loss"), SpikeDetector(spec, "grad_norm")
        self.gradient, self.oscillation = GradientDetector(spec), OscillationDetector(spec)
        self.plateau, self.speed = PlateauDetector(spec, self.total_steps), SpeedDetector(spec, self.hosts)
        self.memory = MemoryDetector(spec, self.memory_limit_bytes, self.total_steps)

    def step(self, record: Record, clocks: tuple[float, float] | None = None) -> list[Alarm]:
        """Once per attempted step, in order. `clocks` are time.time() and time.monotonic()."""
        alarms = self.settings.step(record, clocks)
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            return alarms + self._not_finite(record)
        self._nonfinite = 0
        alarms += self.spike.step(record) if self.judges_loss else []
        alarms += self.grad_spike.step(record)
        alarms += self.plan_gap.step(record) if self.plan_gap else []
        alarms += self.alignment.step(record, self.hacking)
        self._attempts.append(record)
        if len(self._attempts) == BLOCK:
            alarms += self._evaluate()
        return alarms

    def _not_finite(self, record: Record) -> list[Alarm]:
        self._nonfinite += 1
        # With fp16 the loss scale is found by letting the gradient overflow.
        expected = "loss_scale" in record and math.isfinite(record["loss"])
        lasting = self._nonfinite == self.spec.max_vetoes * (FP16_SEARCH if expected else 1)
        new = not expected and debounce(self._active, "nonfinite", True, 1)
        if not (new or lasting):
            return []
        which = [key for key in ("loss", "grad_norm") if not math.isfinite(record[key])]
        symptom = " and ".join(which) + f" not finite, {self._nonfinite} steps in a row"
        severity: Severity = "rollback" if lasting else "warning"
        return make_alarm("nonfinite", record["step"], severity, symptom, 1.0, which=which, in_a_row=self._nonfinite)

    def _evaluate(self) -> list[Alarm]:
        block, self._attempts = StepBlock(self._attempts), []
        debounce(self._active, "nonfinite", False, 1)
        alarms = [
            *self.gradient.block(block), *self.grad_spike.block(block), *self.speed.block(block),
            *self.memory.block(block),
        ]  # fmt: skip
        for detector in (self.spike, self.divergence, self.oscillation, self.plateau) if self.judges_loss else ():
            alarms += detector.block(block)
        return alarms

    def validation(self, record: Record) -> list[Alarm]:
        """Checks the record of a validation."""
        return self.overfitting.validation(record, self.divergence.level()) + self.alignment.validation(record)

    def round(self, answers: Sequence[JudgedAnswer]) -> None:
        """Takes the sampled answers of a round, before its first step. The same on all ranks."""
        self.hacking.round(answers)

    def in_trouble(self) -> bool:
        """Whether an alignment run shows anything that may become an alarm."""
        return bool(self.hacking.streak or self.hacking.active or any(self.alignment.streaks.values()))

    def check_layers(self, step: int, sample: dict[str, Any]) -> list[Alarm]:
        """Checks a sample of `LayerStats`."""
        return self.looks.check(step, sample, self.settings.lr or 0.0)

    def reopen(self, reason: str) -> None:
        """Forgets the past, which a known change (`reason`) makes a bad reference. After a rollback the same trouble is
        then reported again, which the ladder needs in order to climb."""
        self._begin()

    def _detectors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if hasattr(value, "active")}

    def state(self) -> dict[str, Any]:
        """State that a resumed run needs to continue exactly: JSON of 50 kB, or 250 kB with statistics of 80 layers."""
        detectors = {
            name: {key: value for key, value in vars(detector).items() if key not in FIXED}
            for name, detector in self._detectors().items()
        }
        attempts = [{key: record[key] for key in SAVED_KEYS if key in record} for record in self._attempts]
        counters = {"attempts": attempts, "nonfinite": self._nonfinite, "active": self._active}
        copied: dict[str, Any] = json.loads(json.dumps({"detectors": detectors, **counters}))
        return copied

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        state = json.loads(json.dumps(state))
        self._attempts, self._nonfinite, self._active = state["attempts"], state["nonfinite"], state["active"]
        for name, detector in self._detectors().items():
            vars(detector).update(state["detectors"].get(name, {}))  # earlier versions had fewer
        self.settings.offset_s = None  # the monotonic clock differs between processes
