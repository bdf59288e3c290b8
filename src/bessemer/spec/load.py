"""From a YAML file and `--set` overrides to a RunSpec, or to every mistake in it at once, each with its fix."""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bessemer.errors import UserError
from bessemer.spec import hints
from bessemer.spec.checks import check
from bessemer.spec.data import STEPS, SourceSpec
from bessemer.spec.document import Document, override, parse, scalar
from bessemer.spec.document import Path as KeyPath
from bessemer.spec.quantity import shown
from bessemer.spec.schema import RunSpec

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', 100 at most, beginning with a letter or digit",
}
_NUMBERS = ("int_type", "float_type")
_MOST_PASSES = 20
MOST_SHOWN = 20  # problems in one message: what fits a screen


class SpecError(UserError):
    """All the mistakes of a spec; one line each, the first of many."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        more = len(problems) - MOST_SHOWN
        rest = [f"and {more:,} more problems; mend these first"] if more > 0 else []
        super().__init__("\n".join([*problems[:MOST_SHOWN], *rest]))


@dataclass
class LoadedSpec:
    """A valid spec, and the document it came from."""

    spec: RunSpec
    document: Document

    def located(self, problems: Iterable[tuple[KeyPath, str]]) -> list[str]:
        """The problems as lines with their places, in the order of the file."""
        ordered = sorted(problems, key=lambda problem: self.document.rank(problem[0]))
        return [_problem_line(self.document.place(path), path, message) for path, message in ordered]


def _fields_at(path: KeyPath) -> dict[str, FieldInfo] | None:
    """The known fields of the section that `path` leads into, or None where keys are the user's own."""
    model: Any = RunSpec
    for i, step in enumerate(path):
        if i >= 2 and path[i - 2] == "clean" and step in STEPS:  # an entry of a list of steps, by its name
            model = STEPS[str(step)]
        elif isinstance(model, type) and issubclass(model, BaseModel):
            if step not in model.model_fields:
                return None
            model = model.model_fields[str(step)].annotation
        else:
            arguments = typing.get_args(model)
            model = arguments[-1] if arguments else None
        model = _section(model)
    return dict(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else None


def _section(annotation: Any) -> Any:
    """`RopeSpec | None` is the section RopeSpec; whatever else stays as it is."""
    if isinstance(annotation, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else annotation
    return annotation


def _field(path: KeyPath) -> FieldInfo | None:
    return (_fields_at(path[:-1]) or {}).get(str(path[-1])) if path else None


def _yaml(value: Any) -> str:
    """A value on one line, as it would stand in a spec."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _example(path: KeyPath) -> str:
    while path and isinstance(path[-1], int):  # an entry of a list: show the whole list
        path = path[:-1]
    field = _field(path)
    if field is None or not field.examples:
        return ""
    return f"; write {path[-1]}: {_yaml(field.examples[0])} ({field.description})"


def _meant(path: KeyPath) -> str | None:
    """The known key that an unknown one is nearest to."""
    near = difflib.get_close_matches(str(path[-1]), _fields_at(path[:-1]) or {}, n=1, cutoff=0.5)
    return near[0] if near else None


def _accepts(field: FieldInfo, value: Any) -> bool:
    """Whether a value could stand at a key. Not asked of sections."""
    if value is None or (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
        return False
    annotated: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(annotated, config=ConfigDict(strict=True))
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _yaml(value)


def _as_section(path: KeyPath, value: Any) -> str:
    """How to write a single value that stands where a section is expected: `optimizer: {name: adamw}`."""
    fields = _fields_at(path)
    if not fields:
        return ""
    key = hints.MAIN_KEY.get(str(path[-1]), next(iter(fields)))
    field = fields[key]
    if field.annotation is bool:
        value = hints.SWITCH.get(str(value).lower())
    if _accepts(field, value):
        return f"; write {path[-1]}: {{{key}: {_short(value)}}}"
    if not field.examples:
        return f"; its keys are {', '.join(fields)}"
    return f"; write keys below it, such as {path[-1]}: {{{key}: {_yaml(field.examples[0])}}} ({field.description})"


def _unknown(path: KeyPath, value: Any) -> str:
    key = str(path[-1])
    if ours := hints.ours(key):
        note = f" ({hints.FOREIGN[ours][1]})" if hints.FOREIGN[ours][1] else ""
        our_path = tuple(ours.split("."))
        field, meant = _field(our_path), hints.our_value(key, value)
        if field is not None and _accepts(field, meant):
            write = f"; write {our_path[-1]}: {_short(meant)} ({field.description})"
        else:
            write = _example(our_path).replace("; write ", "; such as ", 1)
        return f"unknown key; here it is {ours}{note}{write}"
    holders = [section for section in RunSpec.model_fields if key in (_fields_at((section,)) or {})]
    if holders and (section := path[:-1]) != (holders[0],):
        there = f"{holders[0]}:" + (f" (or {', '.join(holders[1:])})" if holders[1:] else "")
        return f"unknown key {'in ' + '.'.join(map(str, section)) if section else 'here'}; it belongs under {there}"
    if near := _meant(path):
        return f"unknown key; did you mean {near}?"
    return f"unknown key; known here: {', '.join(_fields_at(path[:-1]) or {})}"


def spec_key(name: str) -> str | None:
    """The key, dotted, that an option such as `lr`, `optimizer.lr`, `batch` or `learning-rate` stands for."""
    name = name.replace("-", "_")
    if _field(tuple(name.split("."))):
        return name
    holders = [section for section in RunSpec.model_fields if name in (_fields_at((section,)) or {})]
    return f"{holders[0]}.{name}" if holders else hints.ours(name)


def _explain(error: ErrorDetails, path: KeyPath) -> str:
    """What is wrong with one key, and what to write instead."""
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return _unknown(path, given)
    if kind == "missing":
        return f"missing{_example(path)}"
    if kind in _EXPECTED:
        message = f"expected {_EXPECTED[kind]}, got {shown(given)}"
        if kind in _NUMBERS and isinstance(given, str) and isinstance(scalar(given), (int, float)):
            return f"{message}: remove the quotes"
        if kind == "string_type" and isinstance(given, (int, float)):
            return f'{message}: put it in quotes, {path[-1]}: "{shown(given)}"'
        if path[:2] == ("data", "sources") and len(path) == 3:
            return f"{message}; write {path[-1]}: PATH, or a mapping with path, weight and so on"
        if kind == "model_type" and not isinstance(given, (dict, list)):
            return message + (_example(path) or _as_section(path, given))
        return message + _example(path)
    if kind == "literal_error":
        allowed = error["ctx"]["expected"].replace("'", "")
        words = allowed.replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(str(given), words, n=1)
        return f"expected {allowed}, got {shown(given)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    message = error["msg"][:1].lower() + error["msg"][1:]
    return message.replace("input", shown(given), 1) + _example(path)


def _mend(data: Any, path: KeyPath, missing: bool) -> KeyPath:
    """Take out what is wrong, so that a second look finds what it hid; the part that was taken out.

    Something required gets its example as a stand-in. In a list nothing is moved: the whole list goes.
    """
    trail = [data]
    for step in path[:-1]:
        inside = isinstance(trail[-1], dict) and step in trail[-1]
        inside = inside or (isinstance(trail[-1], list) and isinstance(step, int) and step < len(trail[-1]))
        if not inside:
            break
        trail.append(trail[-1][step])
    depth = len(trail) - 1
    while depth > 0 and not isinstance(trail[depth], dict):
        depth -= 1
    holder, taken = trail[depth], path[: depth + 1]
    if missing and len(taken) == len(path):
        field = _field(path)
        holder[path[-1]] = copy.deepcopy(field.examples[0]) if field and field.examples else None
    elif taken[:2] == ("data", "sources") and len(taken) == 3:
        holder[taken[-1]] = "stand-in"
    else:
        holder.pop(taken[-1], None)
    return taken


def _is(error: ErrorDetails, kind: str) -> bool:
    return error["type"] == kind


def _problem_line(place: str, path: KeyPath, message: str) -> str:
    """One problem is one line."""
    parts = [place, ".".join(str(step) for step in path), message]
    return ": ".join(" ".join(part.split()) for part in parts if part)


def validate(document: Document) -> RunSpec:
    """The spec in a document; all problems together in one SpecError."""
    found: list[tuple[tuple[int, int], str]] = []

    def note(path: KeyPath, message: str, line: int | None = None) -> None:
        place = document.place(path) if line is None else f"{document.name}:{line}"
        found.append((document.rank(path) if line is None else (0, line), _problem_line(place, path, message)))

    for path, line, message in document.problems:
        note(path, message, line)
    data = copy.deepcopy(document.data)
    spec: RunSpec | None = None
    broken: set[KeyPath] = set()
    for _ in range(_MOST_PASSES):
        try:
            spec = RunSpec.model_validate(data)
            break
        except ValidationError as error:
            details = {tuple(detail["loc"]): detail for detail in reversed(error.errors(include_url=False))}
        # A required key that was only misspelt is one mistake, not two.
        unknown = [path for path, detail in details.items() if _is(detail, "extra_forbidden")]
        meant = {(*path[:-1], _meant(path)) for path in unknown}
        meant |= {(ours.split(".")[0],) for path in unknown if (ours := hints.ours(str(path[-1])))}
        broken |= {path for path, detail in details.items() if _is(detail, "missing") and path in meant}
        told = frozenset(broken)
        for path, detail in sorted(details.items(), key=lambda item: str(item[0])):
            if not any(path[: len(known)] == known for known in told):
                note(path, _explain(detail, path))
                broken.add(path)
            broken.add(_mend(data, path, _is(detail, "missing")))
    if spec is not None:
        for path, message in check(spec, broken):
            note(path, message)
    if found:
        raise SpecError([text for _, text in sorted(found, key=lambda item: item[0])])
    assert spec is not None, "a spec without a problem is a spec"
    return spec


def read_text(path: Path) -> str:
    """The text of a spec's file; whatever prevents that is the user's to mend."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a run's YAML file (`bessemer demo` needs none)") from None
    except IsADirectoryError:
        inner = path / "spec.yaml"
        hint = f"{inner}" if inner.is_file() else "the spec's YAML file"
        raise UserError(f"{path}: is a folder; give {hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); a spec is YAML") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{path}: cannot be read: {reason}") from None


def load_document(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> LoadedSpec:
    """Read, override, validate."""
    path = Path(path)
    document = parse(read_text(path), str(path))
    problems = []
    for setting in overrides:
        try:
            override(document, setting)
        except UserError as error:
            problems.append(" ".join(str(error).split()))
    try:
        spec = validate(document)
    except SpecError as error:
        raise SpecError([*error.problems, *problems]) from None
    if problems:
        raise SpecError(problems)
    return LoadedSpec(named(spec, path), document)


def named(spec: RunSpec, path: Path) -> RunSpec:
    """With the file's name, where it has none of its own."""
    if spec.name != "auto":
        return spec
    name = re.sub(r"[^\w.-]+", "-", path.stem).lstrip(".-")[:100]
    return spec.model_copy(update={"name": name or "run"})


def load_spec(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunSpec:
    """The spec in a file, with `--set` style overrides."""
    return load_document(path, overrides).spec


def source_spec(settings: dict[str, Any]) -> SourceSpec:
    """A source described on the command line; what is wrong with it is told by its key."""
    try:
        return SourceSpec.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = tuple(first["loc"])
        raise SpecError([f"{key[0]}: {_explain(first, ('data', 'sources', 'x', *key))}"]) from None


class _Dumper(yaml.SafeDumper):
    """Quotes what `parse` would otherwise read as a number or a truth: PyYAML has other rules for both."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if isinstance(scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_spec(spec: RunSpec) -> str:
    """YAML that loads back to the same spec, in the order of the schema."""
    data = spec.model_dump(mode="json", exclude_none=True)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
