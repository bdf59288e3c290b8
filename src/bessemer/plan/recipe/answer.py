"""An answer of the recipe: a value with why, from where, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

Basis = Literal["established", "empirical at this scale", "open question"]
BASES: tuple[Basis, ...] = get_args(Basis)  # from firm to weak
Value = TypeVar("Value")


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """`source` names the paper, run or rule. `basis` says how far it carries: established (found again by others),
    empirical at this scale (fitted or used near here), or an open question (extrapolated, or sources disagree)."""

    value: Value
    reason: str
    source: str
    basis: Basis
