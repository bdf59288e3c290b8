"""The steps that `clean` lists may name, and how an entry of such a list is read."""

from __future__ import annotations

import difflib
import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag

from bessemer.spec.clean import dedup, privacy, score, sift, text
from bessemer.spec.clean.step import StepSpec
from bessemer.spec.quantity import shown

STEPS: dict[str, type[StepSpec]] = {
    spec.step: spec
    for module in (text, sift, score, privacy, dedup)
    for spec in vars(module).values()
    if isinstance(spec, type) and issubclass(spec, StepSpec) and spec.step
}


def _name(value: Any) -> str | None:
    if isinstance(value, StepSpec):
        return value.step
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


def _known(value: Any) -> Any:
    name = _name(value)
    if name is None:
        raise ValueError(
            f"expected a step's name, or its name and settings such as length: {{min_chars: 100}}; got {shown(value)}"
        )
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no step {shown(name)}{meant} (there are {', '.join(STEPS)})")
    return value


def _union() -> Any:
    """Every step's section, told apart by the name."""
    return functools.reduce(operator.or_, [Annotated[spec, Tag(name)] for name, spec in STEPS.items()])


if TYPE_CHECKING:  # a type checker sees what all steps have in common
    CleanStep = StepSpec
else:
    CleanStep = Annotated[_union(), Discriminator(_name), BeforeValidator(_known)]
