"""From a YAML file and `--set` overrides to a RunSpec, or to every mistake in it at once, each with its fix."""

from __future__ import annotations

import copy
import difflib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bessemer.errors import UserError
from bessemer.spec.checks import check
from bessemer.spec.document import Document, override, parse
from bessemer.spec.document import Path as KeyPath
from bessemer.spec.schema import RunSpec

_EXPECTED = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "string_type": "text", "bool_type": "true or false",
    "list_type": "a list", "dict_type": "a mapping of keys", "model_type": "a mapping of keys",
}


class SpecError(UserError):
    """All the mistakes of a spec; one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass
class Loaded:
    """A valid spec, and the document it came from."""

    spec: RunSpec
    document: Document


def _fields_at(path: KeyPath) -> dict[str, Any] | None:
    """The known fields of the section that `path` leads into, or None where keys are the user's own."""
    model: Any = RunSpec
    for step in path:
        if isinstance(model, type) and issubclass(model, BaseModel):
            if step not in model.model_fields:
                return None
            model = model.model_fields[str(step)].annotation
        else:
            arguments = typing.get_args(model)
            model = arguments[-1] if arguments else None
        inner = [a for a in typing.get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)]
        if inner and typing.get_origin(model) not in (dict, list):
            model = inner[0]
    return dict(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else None


def _example(path: KeyPath) -> str:
    fields = _fields_at(path[:-1]) if path else None
    field = fields.get(str(path[-1])) if fields else None
    if field is None or not field.examples:
        return ""
    example = field.examples[0]
    shown = {True: "true", False: "false"}.get(example, example) if isinstance(example, bool) else example
    return f"; write {path[-1]}: {shown} ({field.description})"


def _explain(error: ErrorDetails, path: KeyPath) -> str:
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        known = list(_fields_at(path[:-1]) or [])
        near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
        if near:
            return f"unknown key; did you mean {near[0]}?"
        holders = [name for name in RunSpec.model_fields if str(path[-1]) in (_fields_at((name,)) or {})]
        hint = f"; it belongs under {holders[0]}:" if holders else ""
        return f"unknown key{hint}; known here: {', '.join(known)}"
    if kind == "missing":
        return f"missing{_example(path)}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {given!r}{_example(path)}"
    if kind == "literal_error":
        allowed = error["ctx"]["expected"]
        near = difflib.get_close_matches(str(given), [word.strip("'") for word in allowed.replace(" or ", ", ").split(", ")], n=1)
        return f"expected {allowed}, got {given!r}" + (f"; did you mean {near[0]}?" if near else "")
    message = error["msg"].removeprefix("Value error, ")
    if message.startswith("Input should"):
        message = f"{given!r} {message.replace('Input should', 'should')}"
    return message + ("" if kind == "value_error" else _example(path))


def _drop(data: Any, path: KeyPath) -> bool:
    """Remove what is wrong, so that a second look can find what it hid."""
    for step in path[:-1]:
        if not isinstance(data, (dict, list)) or (isinstance(data, dict) and step not in data):
            return False
        data = data[step]
    if isinstance(data, dict) and path and path[-1] in data:
        del data[path[-1]]
        return True
    return False


def validate(document: Document) -> RunSpec:
    """The spec in a document; all problems together in one SpecError."""
    found: dict[tuple[KeyPath, str], str] = {}

    def note(path: KeyPath, message: str, place: str | None = None) -> None:
        key = ".".join(str(step) for step in path)
        found.setdefault((path, message), f"{place or document.place(path)}: {key}: {message}" if key else f"{document.name}: {message}")

    for path, line, message in document.problems:
        note(path, message, f"{document.name}:{line}")
    data = copy.deepcopy(document.data)
    spec: RunSpec | None = None
    for _ in range(20):
        try:
            spec = RunSpec.model_validate(data)
            break
        except ValidationError as error:
            progress = False
            for detail in error.errors(include_url=False):
                path = tuple(detail["loc"])
                note(path, _explain(detail, path))
                progress |= _drop(data, path)
            if not progress:
                break
    if spec is not None:
        for key, message in check(spec):
            note(tuple(int(step) if step.isdigit() else step for step in key.split(".")), message)
    if found:
        raise SpecError([found[at] for at in sorted(found, key=lambda at: document.line(at[0]))])
    assert spec is not None
    return spec


def load_document(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Read, override, validate."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such spec; `bessemer demo` runs without one") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give the spec's YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; a spec is YAML") from None
    document = parse(text, str(path))
    for setting in overrides:
        override(document, setting)
    spec = validate(document)
    if spec.name == "auto":
        name = path.stem if path.stem[:1].isalnum() else "run"
        spec = spec.model_copy(update={"name": name})
    return Loaded(spec, document)


def load_spec(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunSpec:
    """The spec in a file, with `--set` style overrides."""
    return load_document(path, overrides).spec


def dump_spec(spec: RunSpec) -> str:
    """YAML that loads back to the same spec, in the order of the schema."""
    import yaml

    return yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)
