"""The escalation ladder: decides what happens when a veto is not enough (`session/recovery` carries it out), and checks
that a run recovered.

Rungs: go on (the veto was enough) -> roll back to the newest healthy state -> roll back further, with a lower learning
rate and tighter clipping for a while -> stop with a report. Trouble within `relapse` steps of a rollback is the same
trouble and climbs; the number of rollbacks in one stretch is bounded.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.spec.guard import GuardSpec

# After a rollback the data is read again if it is not to blame or if the convicted documents are excluded. Otherwise
# the cause may be anything in the window, and the window is skipped (PaLM skipped 200 to 500 batches).
BLAMELESS = ("hardware", "learning rate", "numerics")


@dataclass(frozen=True)
class LadderFacts:
    """Facts for the decision. None: the trial did not determine it, or there was none."""

    step: int
    streak: int  # vetoes in a row, this one included
    finite: bool
    severity: str  # of the symptom: "veto", or an alarm's
    state_healthy: bool | None = None
    verdict: str | None = None
    convicted: int = 0  # documents
    replicas_differ: bool = False


@dataclass(frozen=True)
class Rung:
    """The decision. `depth` 1 is the newest healthy state, 2 the one before it."""

    kind: Literal["go on", "reopen", "rollback", "stop"]
    reason: str
    depth: int = 0
    gentle: bool = False
    skip: bool = False


@dataclass
class Ladder:
    """Decides, and remembers the rollbacks of the run."""

    spec: GuardSpec
    rollbacks: list[int] = field(default_factory=list)  # steps at which trouble led to one
    justified: list[int] = field(default_factory=list)  # vetoed steps whose documents were convicted

    def state(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "justified": self.justified}

    def load(self, state: dict[str, Any]) -> None:
        self.rollbacks, self.justified = list(state["rollbacks"]), list(state["justified"])

    def decide(self, facts: LadderFacts) -> Rung:
        if facts.severity == "stop":
            return Rung("stop", "a rollback cannot repair this")
        if facts.convicted:
            recent = [step for step in self.justified if facts.step - step < self.spec.window]
            self.justified = [*recent, facts.step]
            if len(self.justified) > self.spec.window // 2:
                return Rung("stop", f"{len(self.justified)} of the last {self.spec.window} steps were bad data")
        reason = self._rollback_reason(facts)
        if reason:
            return self._rollback(facts, reason)
        if facts.streak < self.spec.max_vetoes:
            return Rung("go on", "the weights are untouched")
        return Rung(
            "reopen",
            f"{facts.streak} vetoes in a row and no fault found: treated as a lasting change, the window is reset",
        )

    def _rollback_reason(self, facts: LadderFacts) -> str:
        if facts.state_healthy is False:
            return "the weights misbehave on other batches too"
        if facts.replicas_differ:
            return "the weights are not the same on all processes"
        if facts.severity == "rollback":
            return "the run is leaving its trend"
        if facts.streak >= self.spec.max_vetoes and not facts.finite:
            return f"{facts.streak} steps in a row were not finite"
        if facts.streak >= self.spec.max_vetoes and facts.convicted:
            return f"{facts.streak} steps in a row were bad data"
        return ""

    def _rollback(self, facts: LadderFacts, reason: str) -> Rung:
        limit = self.spec.ladder
        earlier = [step for step in self.rollbacks if facts.step - step <= limit.relapse]
        if len(earlier) >= limit.rollbacks:
            return Rung("stop", f"{reason}, after {len(earlier)} rollbacks within {limit.relapse:,} steps")
        self.rollbacks = [*earlier, facts.step]
        excluded = facts.verdict == "data" and facts.convicted > 0
        blameless = facts.replicas_differ or facts.verdict in BLAMELESS or excluded
        first = not earlier or facts.replicas_differ  # smaller steps do not help hardware
        return Rung("rollback", reason, depth=len(earlier) + 1, gentle=not first, skip=not (blameless and first))


SPAN = 8  # accepted steps whose median must have recovered
NEAR = 3.0  # scales above the centre from before the incident


@dataclass
class RecoveryCheck:
    """Watches accepted losses after an incident until their median over SPAN steps is near the earlier centre.

    `on_result` is called once, with the first of these steps and the median, or with None after `patience` steps.
    """

    since: int
    center: float
    scale: float
    patience: int
    on_result: Callable[[int | None, float | None], None]
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SPAN))

    def step(self, record: dict[str, Any]) -> bool:
        """Adds a step; True once the result is known."""
        if record["step"] < self.since:
            return False
        if record["veto"] is None:
            self.recent.append((record["step"], record["loss"]))
        if len(self.recent) == SPAN:
            median = statistics.median(loss for _, loss in self.recent)
            if median <= self.center + NEAR * self.scale:
                self.on_result(self.recent[0][0], median)
                return True
        if record["step"] - self.since >= self.patience:
            self.on_result(None, None)
            return True
        return False
