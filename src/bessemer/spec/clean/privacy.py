"""Settings of the steps for personal data, block lists and opt-outs."""

from __future__ import annotations

from bessemer.spec.clean.step import StepSpec

STEPS: tuple[type[StepSpec], ...] = ()
