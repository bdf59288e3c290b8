"""Which positions of the stream a step reads: a closed-form function of the step, whatever was skipped or resized."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Self

from bessemer.errors import UserError


@dataclass(frozen=True)
class Segment:
    """From step `from_step` on, the stream is read from `position`. A skip after a rollback is one more."""

    from_step: int
    position: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, int]) -> Self:
        return cls(from_step=entry["from_step"], position=entry["position"])


@dataclass(frozen=True)
class BatchPhase:
    """From step `from_step` on, a step has `rows` sequences."""

    from_step: int
    rows: int


class Steps:
    """Which positions each step reads; closed-form, so a seek costs the same anywhere."""

    def __init__(self, batch_phases: Sequence[BatchPhase], segments: Sequence[Segment] = (Segment(0, 0),)) -> None:
        self.batch_phases, self.segments = tuple(batch_phases), tuple(segments)
        self._changes = [phase.from_step for phase in batch_phases]
        if self._changes[:1] != [0] or self._changes != sorted(set(self._changes)):
            raise UserError(f"batch sizes change at steps {self._changes}: begin at 0, then in rising order")
        for phase in batch_phases:
            if phase.rows < 1:
                raise UserError(f"from step {phase.from_step} a batch has {phase.rows} rows: give it at least 1")
        self._cuts = [segment.from_step for segment in segments]
        if self._cuts[:1] != [0] or self._cuts != sorted(self._cuts):
            raise ValueError(f"segments begin at steps {self._cuts}: expected 0 first, then in rising order")
        self._rows_before = [0]  # rows read before each batch phase, had there been no skip
        for last, phase in pairwise(batch_phases):
            self._rows_before.append(self._rows_before[-1] + (phase.from_step - last.from_step) * last.rows)

    def rows(self, step: int) -> int:
        """The step's sequences over all ranks."""
        return self.batch_phases[bisect_right(self._changes, step) - 1].rows

    def position(self, step: int) -> int:
        """The first position that the step reads."""
        segment = self.segments[bisect_right(self._cuts, step) - 1]
        return segment.position + self._unskipped(step) - self._unskipped(segment.from_step)

    def range(self, step: int) -> tuple[int, int]:
        start = self.position(step)
        return start, start + self.rows(step)

    def skip(self, from_step: int, position: int) -> Steps:
        """After a rollback to `from_step`, read on at `position`; segments from there on never happened."""
        kept = [segment for segment in self.segments if segment.from_step < from_step]
        return Steps(self.batch_phases, [*kept, Segment(from_step, position)])

    def _unskipped(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        k = bisect_right(self._changes, step) - 1
        return self._rows_before[k] + (step - self._changes[k]) * self.batch_phases[k].rows
