"""Plan: every decision taken for a run, with value, reason and source. Lies beside the spec, prints as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bessemer.plan.recipe.fine_tuning import Basis

EMPIRICAL: Basis = "empirical at this scale"


@dataclass(frozen=True)
class Decision:
    """One setting and why. `source` is the rule, paper or measurement; `asked` if the user wrote it. `basis` says how
    far a rule of thumb carries; what was asked, counted or measured needs none."""

    key: str
    value: Any
    reason: str
    source: str
    basis: Basis | Literal[""] = ""


@dataclass
class Plan:
    """Decisions in the order they were taken."""

    decisions: dict[str, Decision] = field(default_factory=dict)

    def add(self, key: str, value: Any, reason: str, source: str, basis: Basis | Literal[""] = "") -> Any:
        self.decisions[key] = Decision(key, value, reason, source, basis)
        return value

    def asked(self, key: str, value: Any) -> Any:
        return self.add(key, value, "written in the spec", "asked")

    def choose(self, key: str, written: Any, decide: tuple[Any, str, str], basis: Basis | Literal[""] = "") -> Any:
        """The user's value where there is one, else the planner's (value, reason, source)."""
        return self.asked(key, written) if written not in ("auto", None) else self.add(key, *decide, basis)

    def keep(self, key: str, written: Any, previous: Plan | None) -> Any:
        """What a resumed run decided at its first start and still leaves to the planner; None where there is nothing.

        Another batch would move every position of the data, another split or precision the last digits of the loss.
        """
        if written != "auto" or previous is None or key not in previous.decisions:
            return None
        self.decisions[key] = previous.decisions[key]
        return previous.value(key)

    def value(self, key: str) -> Any:
        return self.decisions[key].value

    def to_json(self) -> str:
        return json.dumps({"decisions": [asdict(decision) for decision in self.decisions.values()]}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        plan = Plan()
        for item in json.loads(text)["decisions"]:
            plan.decisions[item["key"]] = Decision(**item)
        return plan

    def rows(self) -> list[tuple[str, str, str, str]]:
        """For a table: key, value, reason, source and what that rests on."""
        return [
            (d.key, _short(d.value), d.reason, f"{d.source}, {d.basis}" if d.basis else d.source)
            for d in self.decisions.values()
        ]


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_short, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    return str(value)
