"""Loads a RunSpec from a YAML file and `--set` overrides, or reports all mistakes at once, each with its fix."""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bessemer.errors import UserError
from bessemer.spec import hints
from bessemer.spec.checks import check_spec
from bessemer.spec.data import STEPS, SourceSpec
from bessemer.spec.document import KeyPath, YamlDocument, apply_override, parse_scalar, parse_yaml
from bessemer.spec.quantity import format_value
from bessemer.spec.schema import RunSpec, expand_objective, section_of

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
_MAX_PASSES = 20
MAX_PROBLEMS = 20  # in one message: fits on a screen


class SpecError(UserError):
    """All mistakes of a spec, one line each; the message shows the first ones."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        more = len(problems) - MAX_PROBLEMS
        rest = [f"and {more:,} more problems; fix these first"] if more > 0 else []
        super().__init__("\n".join([*problems[:MAX_PROBLEMS], *rest]))


@dataclass
class LoadedSpec:
    """A valid spec and its document."""

    spec: RunSpec
    document: YamlDocument

    def locate(self, problems: Iterable[tuple[KeyPath, str]]) -> list[str]:
        """The problems as lines with file and line, in the order of the file."""
        ordered = sorted(problems, key=lambda problem: self.document.rank(problem[0]))
        return [_problem_line(self.document.place(path), path, message) for path, message in ordered]


def _fields_at(path: KeyPath) -> dict[str, FieldInfo] | None:
    """The fields of the section at `path`, or None where the user chooses the keys."""
    model: Any = RunSpec
    for i, step in enumerate(path):
        if i >= 2 and path[i - 2] == "clean" and step in STEPS:  # an entry of a list of steps
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
    """`RopeSpec | None` is the section RopeSpec; other annotations are returned unchanged."""
    if isinstance(annotation, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else annotation
    return annotation


def _field(path: KeyPath) -> FieldInfo | None:
    return (_fields_at(path[:-1]) or {}).get(str(path[-1])) if path else None


def yaml_text(value: Any, dumper: type[yaml.SafeDumper] = yaml.SafeDumper) -> str:
    """A value as YAML on one line."""
    text = yaml.dump(value, Dumper=dumper, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _example(path: KeyPath) -> str:
    while path and isinstance(path[-1], int):  # an entry of a list: show an example of the list
        path = path[:-1]
    field = _field(path)
    if field is None or not field.examples:
        return ""
    return f"; write {path[-1]}: {yaml_text(field.examples[0])} ({field.description})"


def _nearest_key(path: KeyPath) -> str | None:
    """The known key that is most similar to an unknown one."""
    near = difflib.get_close_matches(str(path[-1]), _fields_at(path[:-1]) or {}, n=1, cutoff=0.5)
    return near[0] if near else None


def _is_valid(field: FieldInfo, value: Any) -> bool:
    """Whether a value is valid for a key. False for sections."""
    if value is None or (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
        return False
    annotated: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(annotated, config=ConfigDict(strict=True))
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def accepts(key: str, value: Any) -> bool:
    """Whether a value is valid for a dotted key by itself. False if there is no such key."""
    field = _field(tuple(key.split(".")))
    return field is not None and _is_valid(field, value)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else yaml_text(value)


def _section_hint(path: KeyPath, value: Any) -> str:
    """How to write a single value as a section: `optimizer: {name: adamw}`."""
    fields = _fields_at(path)
    if not fields:
        return ""
    key = hints.MAIN_KEY.get(str(path[-1]), next(iter(fields)))
    field = fields[key]
    if field.annotation is bool:
        value = hints.SWITCH.get(str(value).lower())
    if _is_valid(field, value):
        return f"; write {path[-1]}: {{{key}: {_short(value)}}}"
    if not field.examples:
        return f"; its keys are {', '.join(fields)}"
    return f"; write keys below it, such as {path[-1]}: {{{key}: {yaml_text(field.examples[0])}}} ({field.description})"


def _explain_unknown_key(path: KeyPath, value: Any, objective: str) -> str:
    key, objective = str(path[-1]), str(path[0]) if len(path) > 1 else objective
    if known := hints.our_key(key, objective):
        note = f" ({text})" if (text := hints.note_on(key, known)) else ""
        known_path = tuple(known.split("."))
        field, translated = _field(known_path), hints.our_value(key, value, objective)
        if field is not None and _is_valid(field, translated):
            fix = f"; write {known_path[-1]}: {_short(translated)} ({field.description})"
        else:
            fix = _example(known_path).replace("; write ", "; for example ", 1)
        return f"unknown key; in Bessemer it is {known}{note}{fix}"
    holders = [section for section in RunSpec.model_fields if key in (_fields_at((section,)) or {})]
    holders = [objective] if objective in holders else holders
    if holders and (section := path[:-1]) != (holders[0],):
        sections = f"{holders[0]}:" + (f" (or {', '.join(holders[1:])})" if holders[1:] else "")
        place = f"in {'.'.join(map(str, section))}" if section else "here"
        return f"unknown key {place}; it belongs under {sections}"
    if near := _nearest_key(path):
        return f"unknown key; did you mean {near}?"
    return f"unknown key; known keys: {', '.join(_fields_at(path[:-1]) or {})}"


def spec_key(name: str) -> str | None:
    """The dotted key for an option such as `lr`, `optimizer.lr`, `batch` or `learning-rate`."""
    name = name.replace("-", "_")
    if _field(tuple(name.split("."))):
        return name
    holders = [section for section in RunSpec.model_fields if name in (_fields_at((section,)) or {})]
    return f"{holders[0]}.{name}" if holders else hints.our_key(name)


def _explain(error: ErrorDetails, path: KeyPath, objective: str = "") -> str:
    """What is wrong with a key, and what to write instead."""
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return _explain_unknown_key(path, given, objective)
    if kind == "missing":
        return f"missing{_example(path)}"
    if kind in _EXPECTED:
        message = f"expected {_EXPECTED[kind]}, got {format_value(given)}"
        if (
            kind in ("int_type", "float_type")
            and isinstance(given, str)
            and isinstance(parse_scalar(given), (int, float))
        ):
            return f"{message}: remove the quotes"
        if kind == "string_type" and isinstance(given, (int, float)):
            return f'{message}: put it in quotes, {path[-1]}: "{format_value(given)}"'
        if path[:2] == ("data", "sources") and len(path) == 3:
            return f"{message}; write {path[-1]}: PATH, or a mapping with path, weight, ..."
        if kind == "model_type" and not isinstance(given, (dict, list)):
            return message + (_example(path) or _section_hint(path, given))
        return message + _example(path)
    if kind == "literal_error":
        allowed = error["ctx"]["expected"].replace("'", "")
        words = allowed.replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(str(given), words, n=1)
        return f"expected {allowed}, got {format_value(given)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    message = error["msg"][:1].lower() + error["msg"][1:]
    return message.replace("input", format_value(given), 1) + _example(path)


def _repair(data: Any, path: KeyPath, missing: bool) -> KeyPath:
    """Remove a wrong value, so that the next validation finds the mistakes it hid; the path that was removed.

    A missing required key gets its example. A wrong entry of a list removes the whole list.
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
    holder, removed = trail[depth], path[: depth + 1]
    if missing and len(removed) == len(path):
        field = _field(path)
        holder[path[-1]] = copy.deepcopy(field.examples[0]) if field and field.examples else None
    elif removed[:2] == ("data", "sources") and len(removed) == 3:
        holder[removed[-1]] = "placeholder"
    else:
        holder.pop(removed[-1], None)
    return removed


def _problem_line(place: str, path: KeyPath, message: str) -> str:
    """A problem on one line."""
    parts = [place, ".".join(str(step) for step in path), message]
    return ": ".join(" ".join(part.split()) for part in parts if part)


def _expanded(document: YamlDocument) -> Any:
    """A copy of the data without the short form of `objective`, whose settings keep their lines."""
    data = copy.deepcopy(document.data)
    if not isinstance(data, dict) or (expanded := expand_objective(data)) is data:
        return data
    below = ("objective", expanded["objective"])
    for path, line in list(document.lines.items()):
        if path[:2] == below:
            document.lines[section_of(below[1]), *path[2:]] = line
    for path, setting in list(document.overrides.items()):
        if path[:2] == below:
            document.overrides[section_of(below[1]), *path[2:]] = setting
    return expanded


def validate(document: YamlDocument) -> RunSpec:
    """The spec in a document. All problems together are one SpecError."""
    problems: list[tuple[tuple[int, int], str]] = []

    def add_problem(path: KeyPath, message: str, line: int | None = None) -> None:
        place = document.place(path) if line is None else f"{document.name}:{line}"
        problems.append((document.rank(path) if line is None else (0, line), _problem_line(place, path, message)))

    for path, line, message in document.problems:
        add_problem(path, message, line)
    data = _expanded(document)
    objective = data.get("objective") if isinstance(data, dict) else None
    objective = str(next(iter(objective), "") if isinstance(objective, dict) else objective or "")
    spec: RunSpec | None = None
    broken: set[KeyPath] = set()
    for _ in range(_MAX_PASSES):
        try:
            spec = RunSpec.model_validate(data)
            break
        except ValidationError as error:
            details = {tuple(detail["loc"]): detail for detail in reversed(error.errors(include_url=False))}
        # A misspelt required key is one mistake, not an unknown key and a missing one.
        unknown = [path for path, detail in details.items() if detail["type"] == "extra_forbidden"]
        intended = {(*path[:-1], _nearest_key(path)) for path in unknown}
        intended |= {(known.split(".")[0],) for path in unknown if (known := hints.our_key(str(path[-1])))}
        broken |= {path for path, detail in details.items() if detail["type"] == "missing" and path in intended}
        reported = frozenset(broken)
        for path, detail in sorted(details.items(), key=lambda item: str(item[0])):
            if not any(path[: len(known)] == known for known in reported):
                add_problem(path, _explain(detail, path, objective))
                broken.add(path)
            broken.add(_repair(data, path, detail["type"] == "missing"))
    if spec is not None:
        for path, message in check_spec(spec, broken):
            add_problem(path, message)
    if problems:
        raise SpecError([text for _, text in sorted(problems, key=lambda item: item[0])])
    assert spec is not None, "no problem means that validation succeeded"
    return spec


def read_text(path: Path, expected: str = "") -> str:
    """The text of a spec file, or of another kind of file, which `expected` names ("a .jsonl file of questions").
    UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = expected or "the YAML file of a run (`bessemer demo` needs none)"
        raise UserError(f"{path}: no such file; pass {hint}") from None
    except IsADirectoryError:
        inner = path / "spec.yaml"
        hint = expected or (str(inner) if inner.is_file() else "the YAML file of a spec")
        raise UserError(f"{path}: is a folder; pass {hint}") from None
    except UnicodeDecodeError as error:
        hint = f"pass {expected}" if expected else "a spec is YAML"
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); {hint}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{path}: cannot be read: {reason}") from None


def load_document(source: str | Path | Mapping[str, Any] | RunSpec, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read a file, or take a spec's keys as a mapping; apply overrides, validate."""
    document = _to_document(source)
    if "stages" in document.data:
        raise UserError(
            f"{document.place(('stages',))}: stages: is for `bessemer train` and `bessemer spec check`; for other "
            "commands pass the spec of one stage, which train writes to RUNS/NAME/stages/"
        )
    problems = []
    for setting in overrides:
        try:
            apply_override(document, setting)
        except UserError as error:
            problems.append(" ".join(str(error).split()))
    try:
        spec = validate(document)
    except SpecError as error:
        raise SpecError([*error.problems, *problems]) from None
    if problems:
        raise SpecError(problems)
    return LoadedSpec(with_default_name(spec, Path(document.name)), document)


def _to_document(source: str | Path | Mapping[str, Any] | RunSpec) -> YamlDocument:
    if isinstance(source, RunSpec):
        return YamlDocument(parse_yaml(dump_spec(source), source.name).data, source.name)
    if isinstance(source, Mapping):
        return YamlDocument(copy.deepcopy(dict(source)), "run")
    return parse_yaml(read_text(Path(source)), str(source))


def override_lines(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides as `--set` takes them: `{"optimizer.lr": 3e-4}` is `optimizer.lr=0.0003`."""
    if isinstance(overrides, str):
        return [overrides]
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={yaml_text(value, _Dumper)}" for key, value in overrides.items()]


def with_default_name(spec: RunSpec, path: Path) -> RunSpec:
    """The spec with the name of its file, if it has no name."""
    if spec.name != "auto":
        return spec
    name = re.sub(r"[^\w.-]+", "-", path.stem).lstrip(".-")[:100]
    return spec.model_copy(update={"name": name or "run"})


def load_spec(source: str | Path | Mapping[str, Any] | RunSpec, overrides: Sequence[str] = ()) -> RunSpec:
    """Load a spec file, or a mapping of its keys, with `--set` style overrides. UserError lists all mistakes."""
    return load_document(source, overrides).spec


def source_spec(settings: dict[str, Any]) -> SourceSpec:
    """A source from command-line options. A mistake is reported by its key."""
    try:
        return SourceSpec.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = tuple(first["loc"])
        raise SpecError([f"{key[0]}: {_explain(first, ('data', 'sources', 'x', *key))}"]) from None


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `parse` would read as a number or boolean; PyYAML has other rules for both."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if isinstance(parse_scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


# Settings that a start decides by the objective if the spec does not name them: their defaults are not written.
_DECIDED_AT_START: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("data", "packing"), ("tokenizer", "chat")),
    "classify": (("data", "packing"), ("data", "padding", "long")),
}


def dump_spec(spec: RunSpec) -> str:
    """YAML that loads back to the same spec, in the order of the schema."""
    data = spec.model_dump(mode="json", exclude_none=True)
    for *sections, key in _DECIDED_AT_START.get(spec.objective, ()):
        section: Any = spec
        written = data
        for name in sections:
            section, written = getattr(section, name), written[name]
        if key not in section.model_fields_set:
            del written[key]
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
