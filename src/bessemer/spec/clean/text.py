"""Settings of the steps for cleaning and heuristic filters."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bessemer.spec.clean.step import StepSpec


class WhitespaceSpec(StepSpec):
    """Line ends become newlines, spaces at line ends go, and long runs of empty lines shrink."""

    step: ClassVar[str] = "whitespace"
    most_empty_lines: int = Field(2, ge=0, description="empty lines kept in a row", examples=[2])


class LengthSpec(StepSpec):
    """Documents that are too short or too long go."""

    step: ClassVar[str] = "length"
    min_chars: int = Field(1, ge=0, description="fewest characters", examples=[100])
    max_chars: int | None = Field(None, ge=1, description="most characters", examples=[1000000])


STEPS: tuple[type[StepSpec], ...] = (WhitespaceSpec, LengthSpec)
