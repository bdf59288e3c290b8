"""The verbs of the command line as tools: names, JSON Schemas of their options, and the command line of a call.

They are read from the commands themselves, so a verb and its tool cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from bessemer.errors import UserError

# Verbs whose only output is JSON, so that they have no --json.
ALWAYS_JSON = ("checkpoints lineage", "spec schema")
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


@dataclass(frozen=True)
class Parameter:
    """An argument or option of a verb. `flag` is empty for arguments; `off_flag` is the --no- form."""

    name: str
    kind: str
    help: str
    flag: str = ""
    off_flag: str = ""
    many: bool = False
    required: bool = False
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None

    def schema(self) -> dict[str, Any]:
        value: dict[str, Any] = {"type": self.kind}
        value |= {} if self.minimum is None else {"minimum": self.minimum}
        value |= {} if self.maximum is None else {"maximum": self.maximum}
        schema: dict[str, Any] = {"type": "array", "items": value} if self.many else value
        if isinstance(self.default, (bool, int, float, str)) and self.default != "":
            schema["default"] = self.default
        return schema | ({"description": self.help} if self.help else {})

    def words(self, value: Any) -> list[str]:
        """The words of a command line that give this parameter the value."""
        values = value if self.many and isinstance(value, list) else [value]
        return [word for one in values for word in self._word(one)]

    def _word(self, value: Any) -> list[str]:
        if not _fits(value, self.kind):
            raise UserError(f"{self.name}: {value!r} is not of type {self.kind}")
        if self.kind == "boolean":
            flag = self.flag if value else self.off_flag
            return [flag] if flag else []
        if self.flag:
            return [f"{self.flag}={value}"]
        if str(value).startswith("-"):
            raise UserError(f"{self.name}: {value!r} starts with -: only options do")
        return [str(value)]


def _fits(value: Any, kind: str) -> bool:
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "string":
        return isinstance(value, str)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (kind == "number" or isinstance(value, int))


@dataclass(frozen=True)
class Verb:
    """A command of `bessemer`, such as `checkpoints list`."""

    path: str
    help: str
    parameters: tuple[Parameter, ...]
    answers_json: bool
    has_json_flag: bool

    @property
    def tool_name(self) -> str:
        return self.path.replace(" ", "_").replace("-", "_")

    @property
    def summary(self) -> str:
        """The help without its examples, which are command lines."""
        return " ".join(self.help.partition("Example:")[0].split())

    @property
    def example(self) -> str:
        return " ".join(self.help.partition("Example:")[2].partition("Example:")[0].split())

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {each.name: each.schema() for each in self.parameters},
            "required": [each.name for each in self.parameters if each.required],
            "additionalProperties": False,
        }

    def command(self, arguments: Mapping[str, Any]) -> list[str]:
        """The words after `bessemer` for a call with these arguments, with --json."""
        known = {each.name: each for each in self.parameters}
        if unknown := [name for name in arguments if name not in known]:
            raise UserError(f"{unknown[0]}: {self.path} has no such argument; it has {', '.join(known)}")
        if missing := [each.name for each in self.parameters if each.required and arguments.get(each.name) is None]:
            raise UserError(f"{missing[0]}: missing")
        words = self.path.split() + (["--json"] if self.has_json_flag else [])
        given = {name: value for name, value in arguments.items() if value is not None}
        options = [each for each in self.parameters if each.flag]
        positional = [each for each in self.parameters if not each.flag]
        for each in (*options, *positional):
            words += each.words(given[each.name]) if each.name in given else []
        return words


def collect_verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[Verb]:
    """Every verb below a command of the command line, which is a group or a verb itself."""
    children = getattr(command, "commands", None) or {}
    if path and (not children or getattr(command, "invoke_without_command", False)):
        yield _verb(command, " ".join(path))
    for name, child in children.items():
        yield from collect_verbs(child, (*path, name))


def _verb(command: Any, path: str) -> Verb:
    flags = {flag for each in command.params for flag in each.opts}
    has_json = "--json" in flags
    shown = [each for each in command.params if not {"--json", "--help", "--install-completion"} & set(each.opts)]
    return Verb(path, command.help or "", tuple(map(_parameter, shown)), has_json or path in ALWAYS_JSON, has_json)


def _parameter(parameter: Any) -> Parameter:
    annotation = parameter.type_descriptor.annotation
    inner = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    flag = next((opt for opt in parameter.opts if opt.startswith("--")), "")
    many = bool(parameter.multiple or parameter.nargs == -1)
    default = None if callable(parameter.default) else parameter.default
    return Parameter(
        name=(flag.removeprefix("--") or parameter.name).replace("-", "_"),
        kind=_KINDS.get(inner[0], "string"),
        help=" ".join((parameter.help or "").split()),
        flag=flag,
        off_flag=next(iter(parameter.secondary_opts), ""),
        many=many,
        required=bool(parameter.required),
        default=str(default) if isinstance(default, Path) else default,
        minimum=parameter.min,
        maximum=parameter.max,
    )
