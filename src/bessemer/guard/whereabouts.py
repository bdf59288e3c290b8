"""Where this process is: step and phase, noted by the loop as it goes. What a hang is told by, and a slow rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Whereabouts:
    """`entered` counts phases of the step: all processes of a run pass the same ones, so the lowest is behind."""

    step: int = -1
    phase: str = "start"
    entered: int = 0
    first_s: dict[str, float] = field(default_factory=dict)  # when the step first came to a phase, on the steady clock

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.entered, self.first_s = step, 0, {}
        self.enter("begin")

    def enter(self, phase: str) -> None:
        """Half a microsecond: it is called a dozen times in a step."""
        self.phase = phase
        self.entered += 1
        self.first_s.setdefault(phase, time.perf_counter())

    def between_s(self, one: str, other: str) -> float:
        """Seconds from the first entry of one phase to that of another; 0 where the step has not both."""
        if one not in self.first_s or other not in self.first_s:
            return 0.0
        return max(0.0, self.first_s[other] - self.first_s[one])
