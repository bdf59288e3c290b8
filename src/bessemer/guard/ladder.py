"""The ladder: what is done when a veto is not enough. It only decides; the supervisor carries it out.

Rung by rung: go on (the veto was enough) -> roll back to the newest healthy state -> roll back further, with a lower
learning rate and tighter clipping for a while -> stop with a report. Trouble within `relapse` steps of a rollback is
the same trouble and climbs; the number of rollbacks in one stretch is bounded.

Whether a run came back to its trend after an incident: the proof that a repair worked.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.spec.guard import GuardSpec

# Which data is read again after a rollback: all of it where the data is not to blame or the guilty documents are known
# and left out, none of the window where the cause may be anything in it (PaLM skipped 200 to 500 batches).
BLAMELESS = ("hardware", "learning rate", "numerics")


@dataclass(frozen=True)
class LadderFacts:
    """What is known when the decision is taken. None: the trial could not tell, or there was none."""

    step: int
    streak: int  # vetoes in a row, this one included
    finite: bool
    severity: str  # of the symptom: "veto", or an alarm's
    state_healthy: bool | None = None
    verdict: str | None = None
    convicted: int = 0  # documents
    apart: bool = False  # processes that should hold the same weights do not


@dataclass(frozen=True)
class Rung:
    """What to do. `depth` 1 is the newest healthy state, 2 the one before it."""

    kind: Literal["go on", "reopen", "rollback", "stop"]
    reason: str
    depth: int = 0
    gentle: bool = False
    skip: bool = False


@dataclass
class Ladder:
    """Remembers the rollbacks of the run."""

    spec: GuardSpec
    rollbacks: list[int] = field(default_factory=list)  # steps at which trouble led to one
    justified: list[int] = field(default_factory=list)  # vetoed steps whose documents were convicted

    def state(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "justified": self.justified}

    def load(self, state: dict[str, Any]) -> None:
        self.rollbacks, self.justified = list(state["rollbacks"]), list(state["justified"])

    def decide(self, facts: LadderFacts) -> Rung:
        """The rung for this trouble."""
        if facts.severity == "stop":
            return Rung("stop", "the trouble cannot be repaired by going back")
        if facts.convicted:
            recent = [step for step in self.justified if facts.step - step < self.spec.window]
            self.justified = [*recent, facts.step]
            if len(self.justified) > self.spec.window // 2:
                return Rung("stop", f"{len(self.justified)} of the last {self.spec.window} steps were bad data")
        reason = self._why_back(facts)
        if reason:
            return self._back(facts, reason)
        if facts.streak < self.spec.max_vetoes:
            return Rung("go on", "the weights are untouched")
        return Rung(
            "reopen",
            f"{facts.streak} vetoes in a row and no fault found: taken for a lasting change, the window starts anew",
        )

    def _why_back(self, facts: LadderFacts) -> str:
        if facts.state_healthy is False:
            return "the weights misbehave on other batches too"
        if facts.apart:
            return "the weights are not the same on all processes"
        if facts.severity == "rollback":
            return "the run is leaving its trend"
        if facts.streak >= self.spec.max_vetoes and not facts.finite:
            return f"{facts.streak} steps in a row were not finite"
        if facts.streak >= self.spec.max_vetoes and facts.convicted:
            return f"{facts.streak} steps in a row were bad data"
        return ""

    def _back(self, facts: LadderFacts, reason: str) -> Rung:
        limit = self.spec.ladder
        earlier = [step for step in self.rollbacks if facts.step - step <= limit.relapse]
        if len(earlier) >= limit.rollbacks:
            return Rung("stop", f"{reason}, after {len(earlier)} rollbacks within {limit.relapse:,} steps")
        self.rollbacks = [*earlier, facts.step]
        known = facts.apart or facts.verdict in BLAMELESS or (facts.verdict == "data" and facts.convicted > 0)
        first = not earlier or facts.apart  # a gentler step helps no hardware
        return Rung("rollback", reason, depth=len(earlier) + 1, gentle=not first, skip=not (known and first))


SPAN = 8  # accepted steps whose median must be back
NEAR = 3.0  # scales above the centre before the incident


@dataclass
class RecoveryCheck:
    """Watches accepted losses after an incident until their median over SPAN steps is near the former centre.

    `told` is called once, with the step from which they were and the median, or with None after `patience` steps.
    """

    since: int
    center: float
    scale: float
    patience: int
    told: Callable[[int | None, float | None], None]
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SPAN))

    def step(self, record: dict[str, Any]) -> bool:
        """One more step; True once the answer is known."""
        if record["step"] < self.since:
            return False
        if record["veto"] is None:
            self.recent.append((record["step"], record["loss"]))
        if len(self.recent) == SPAN:
            median = statistics.median(loss for _, loss in self.recent)
            if median <= self.center + NEAR * self.scale:
                self.told(self.recent[0][0], median)
                return True
        if record["step"] - self.since >= self.patience:
            self.told(None, None)
            return True
        return False
