"""The plan of a run: every decision with its value, reason and source. A run folder stores it as plan.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

Basis = Literal["established", "empirical at this scale", "open question"]
BASES: tuple[Basis, ...] = get_args(Basis)  # strongest first
EMPIRICAL: Basis = "empirical at this scale"
Value = TypeVar("Value")


@dataclass(frozen=True)
class RecipeAnswer(Generic[Value]):
    """A value that the recipe recommends. `source` names the paper, run or rule. `basis` says how reliable it is:
    established (reproduced by others), empirical at this scale (fitted or used at a similar size), or an open question
    (extrapolated, or sources disagree)."""

    value: Value
    reason: str
    source: str
    basis: Basis


@dataclass(frozen=True)
class Decision:
    """One setting and why. `source` is the rule, paper or measurement, or `asked` if the user set it. `basis` is empty
    for values that were set, counted or measured."""

    key: str
    value: Any
    reason: str
    source: str
    basis: Basis | Literal[""] = ""


@dataclass
class Plan:
    """Decisions in the order in which they were made."""

    decisions: dict[str, Decision] = field(default_factory=dict)

    def add(self, key: str, value: Any, reason: str, source: str, basis: Basis | Literal[""] = "") -> Any:
        self.decisions[key] = Decision(key, value, reason, source, basis)
        return value

    def add_answer(self, key: str, answer: RecipeAnswer[Any]) -> Any:
        return self.add(key, answer.value, answer.reason, answer.source, answer.basis)

    def add_requested(self, key: str, value: Any) -> Any:
        """A value that the user set."""
        return self.add(key, value, "written in the spec", "asked")

    def choose(self, key: str, setting: Any, decided: tuple[Any, str, str], basis: Basis | Literal[""] = "") -> Any:
        """The user's setting if there is one, else the planner's (value, reason, source)."""
        return self.add_requested(key, setting) if setting not in ("auto", None) else self.add(key, *decided, basis)

    def keep(self, key: str, setting: Any, previous: Plan | None) -> Any:
        """The value that a resumed run decided at its first start, if the spec still leaves the key open; else None.

        Another batch would move every data position; another split or precision would change the last digits of the
        loss.
        """
        if setting != "auto" or previous is None or key not in previous.decisions:
            return None
        self.decisions[key] = previous.decisions[key]
        return previous.value(key)

    def value(self, key: str) -> Any:
        return self.decisions[key].value

    def to_json(self) -> str:
        return json.dumps({"decisions": [asdict(decision) for decision in self.decisions.values()]}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        return Plan({item["key"]: Decision(**item) for item in json.loads(text)["decisions"]})

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of a table: key, value, reason, and source with its basis."""
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
