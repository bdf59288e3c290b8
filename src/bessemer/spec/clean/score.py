"""Settings of the steps for language, classifiers and other scores."""

from __future__ import annotations

from bessemer.spec.clean.step import StepSpec

STEPS: tuple[type[StepSpec], ...] = ()
