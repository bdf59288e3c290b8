"""Finding: what is wrong with a run and what to do. Guard, trial, plan and diagnose all return it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SEVERITIES = ("note", "warning", "critical")  # a note needs no action


@dataclass(frozen=True)
class Cause:
    """A possible cause of a symptom. `name` is its identifier, such as `lr_too_high`, which runbooks share."""

    name: str
    text: str
    confidence: float
    check: str = ""  # what would confirm it or rule it out
    fix: str = ""  # a command, a change of the spec, or a line of the framework's configuration


@dataclass(frozen=True)
class Finding:
    """A symptom with its evidence. `confidence` is between 0 and 1; `cause` is empty if unknown."""

    symptom: str
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    confidence: float = 0.0
    fix: str = ""
    severity: str = ""  # one of SEVERITIES where a reader has set it
    step: int | None = None
    rule: str = ""  # identifier of the cause
    check: str = ""  # what would confirm the cause or rule it out
    unknown: str = ""  # what the evidence does not tell
    alternatives: tuple[Cause, ...] = ()  # less probable causes, best first

    @staticmethod
    def of_causes(symptom: str, causes: list[Cause], **parts: Any) -> Finding:
        """A finding with its causes ranked by confidence. `parts` are further fields."""
        first, *rest = sorted(causes, key=lambda cause: -cause.confidence)
        return Finding(
            symptom, cause=first.text, confidence=first.confidence, fix=first.fix, rule=first.name, check=first.check,
            alternatives=tuple(rest), **parts,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All fields; those that say nothing are left out, so that records stay short."""
        content = asdict(self)
        always = ("symptom", "evidence", "cause", "confidence", "fix")
        return {name: value for name, value in content.items() if name in always or value not in ("", (), None)}
