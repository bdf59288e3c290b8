"""The configuration reference as Markdown, generated from the schema so that it cannot fall behind.

`python -m bessemer.spec.reference > docs/configuration.md` writes it; a test compares the two.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bessemer.spec.curate.step import StepSpec
from bessemer.spec.data import STEPS
from bessemer.spec.schema import RunSpec


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, BaseModel):  # a section: what of it is not its default, or its first key
        written = value.model_dump(exclude_defaults=True)
        first = next(iter(type(value).model_fields))
        return _shown(written or {first: getattr(value, first)})
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return "-" if value is None else str(value)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "-"
    return _shown(field.default)


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also inside a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if issubclass(annotation, StepSpec) else annotation
    return next((found for part in typing.get_args(annotation) if (found := _inner(part))), None)


def _section(key: str, model: type[BaseModel]) -> list[str]:
    lines = [f"## {key}" if key else "## The top", "", inspect.cleandoc(model.__doc__ or ""), ""]
    lines += ["| key | default | what it is | example |", "|---|---|---|---|"]
    below: list[str] = []
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        if inner is not None:
            below += _section(f"{key}.{name}" if key else name, inner)
        example = f"`{_shown(field.examples[0])}`" if field.examples else ""
        lines.append(f"| `{name}` | {_default(field)} | {field.description or ''} | {example} |")
    return [*lines, "", *below]


def _steps() -> list[str]:
    lines = [
        "# Curation steps",
        "",
        "An entry of `data.clean`, or of a source's `clean`, is a step's name, or its name",
    ]
    lines += [
        "and settings: `- length: {min_chars: 100}`. The defaults are the published ones where there are any.",
        "",
    ]
    for name, spec in STEPS.items():
        lines += _section(name, spec)
    return lines


def reference() -> str:
    """The whole page."""
    head = [
        "# Configuration",
        "",
        "Every key of a run's spec, generated from the schema (`python -m bessemer.spec.reference`). `auto` is",
        "decided by the planner when the run starts, and `plan.json` in the run's folder says what was decided and",
        "why. Counts take K, M, B, T (powers of ten) and Ki, Mi, Gi (powers of 1024); shares take `2%` or `0.02`;",
        "times take `90s`, `10 min`, `2h`. Relative paths start at the folder in which the command is called, not",
        "at the spec's.",
        "",
    ]
    return "\n".join([*head, *_section("", RunSpec), *_steps()]).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")
