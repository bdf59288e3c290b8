"""Finding: what is wrong and what to do. Guard, trial and diagnose all speak it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A symptom with its evidence. `confidence` is between 0 and 1; `cause` may be empty when it is not known."""

    symptom: str
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    confidence: float = 0.0
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
