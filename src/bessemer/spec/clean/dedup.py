"""Settings of the steps for deduplication and decontamination."""

from __future__ import annotations

from bessemer.spec.clean.step import StepSpec

STEPS: tuple[type[StepSpec], ...] = ()
