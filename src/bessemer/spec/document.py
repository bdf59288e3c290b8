"""Reads YAML with line numbers for error messages, and without YAML's surprises.

PyYAML reads `1e-4` as a string and `no` as False, and lets a second key silently replace the first. Here numbers are
numbers, only true and false are booleans, and duplicate keys are errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from bessemer.errors import UserError

KeyPath = tuple[str | int, ...]
_BOOL = {"true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)(e[-+]?[0-9]+)?", re.I)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.I)
_MAX_NUMBER_CHARS = 64  # longer numbers stay text: Python refuses to convert thousands of digits
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # not allowed in paths and names
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")}
_MERGE = "tag:yaml.org,2002:merge"
_VALUE = "tag:yaml.org,2002:value"
_MAX_DEPTH, _MAX_NODES = 50, 100_000  # aliases can make a small file huge


@dataclass
class YamlDocument:
    """Plain data, and the line or `--set` that each part of it comes from."""

    data: Any
    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[KeyPath, int, str]] = field(default_factory=list)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def _nearest(self, path: KeyPath) -> KeyPath | None:
        """The nearest part with a known origin; for a section that only settings created, one of these settings."""
        if path and path not in self.overrides and path not in self.lines:
            below = next((known for known in self.overrides if known[: len(path)] == path), None)
            if below is not None:
                return below
        ends = range(len(path), -1, -1)
        return next((path[:end] for end in ends if path[:end] in self.overrides or path[:end] in self.lines), None)

    def place(self, path: KeyPath) -> str:
        """`file:line` or `--set` of the nearest part with a known origin."""
        near = self._nearest(path)
        if near is None:
            return self.name
        return f"--set {self.overrides[near]}" if near in self.overrides else f"{self.name}:{self.lines[near]}"

    def rank(self, path: KeyPath) -> tuple[int, int]:
        """Sort key of messages: by line, then settings in the order of the command line."""
        near = self._nearest(path)
        if near in self.overrides:
            return 1, list(self.overrides).index(near)
        return 0, self.lines[near] if near is not None else 0


def parse_scalar(text: str) -> Any:
    """The value of an unquoted word: a number, true, false, None, or the word itself."""
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if text in ("", "~") or text.lower() == "null":
        return None
    if len(text) > _MAX_NUMBER_CHARS:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Reader:
    """Converts YAML nodes to plain data; records lines and problems in the document."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.nodes = 0

    def to_plain(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(path, line)
        self.nodes += 1
        if len(path) > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise UserError(f"{self.document.name}:{line}: too deeply nested; a spec has a few levels of keys")
        if node.tag not in _TAGS and node.tag not in (_MERGE, _VALUE):
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            self._problem(path, line, f"the tag {tag.strip('!')!r} is not supported: write the value itself")
        if isinstance(node, yaml.ScalarNode):
            text = self._clean(node.value, path, line)
            return text if node.style in ("'", '"', "|", ">") else parse_scalar(text)
        if isinstance(node, yaml.SequenceNode):
            return [self.to_plain(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, line, "a key must be a plain word")
                continue
            if key_node.tag == _MERGE:
                self._problem(path, line, "merge keys (<<) are not supported: repeat the keys here")
                continue
            key = self._clean(key_node.value, path, line)
            if key in result:
                first = self.document.lines[(*path, key)]
                self._problem((*path, key), line, f"written twice, first in line {first}: remove one")
                continue
            self.document.lines[(*path, key)] = line
            result[key] = self.to_plain(value_node, (*path, key))
        return result

    def _clean(self, text: str, path: KeyPath, line: int) -> str:
        if match := _CONTROL.search(text):
            self._problem(path, line, f"contains the control character {match[0]!r}: remove it")
        return _CONTROL.sub("_", text)

    def _problem(self, path: KeyPath, line: int, message: str) -> None:
        self.document.problems.append((path, line, message))


def _compose(text: str, name: str) -> yaml.Node | None:
    """The YAML node tree. PyYAML also raises ValueError for a bad escape and RecursionError for deep nesting."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join((error.problem or str(error)).split())
        raise UserError(f"{name}{line}: not YAML: {problem}; check quotes, colons and indentation") from None
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        character = chr(error.character) if isinstance(error.character, int) else error.character
        raise UserError(f"{name}:{line_number}: not text: the character {character!r} is not allowed") from None
    except RecursionError:
        raise UserError(f"{name}: too deeply nested; a spec has a few levels of keys") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}; check quotes and escapes") from None


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse YAML text to a Document. A syntax error is a UserError with its line."""
    document = YamlDocument(None, name)
    node = _compose(text, name)
    document.data = {} if node is None else _Reader(document).to_plain(node, ())
    if not isinstance(document.data, dict):
        raise UserError(f"{name}:{document.lines[()]}: a spec is a mapping of keys such as model, data and budget")
    return document


def apply_override(document: YamlDocument, setting: str) -> None:
    """Apply one setting `a.b=c`; c is parsed as YAML, so numbers, lists and `auto` work."""
    name = f"--set {setting}"
    key, equals, text = setting.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UserError(f"{name}: write it as key=value, such as --set optimizer.lr=3e-4")
    node = _compose(text, name)
    parsed = YamlDocument(None, name)
    value = None if node is None else _Reader(parsed).to_plain(node, ())
    if parsed.problems:
        raise UserError(f"{name}: {parsed.problems[0][2]}")
    target, path = document.data, tuple[str | int, ...]()
    for i, part in enumerate(parts):
        path = (*path, _key_of(target, part, f"{name}: {'.'.join(parts[:i])}"))
        if i == len(parts) - 1:
            target[path[-1]] = value
            break
        old = target.get(part) if isinstance(target, dict) else target[path[-1]]
        target[path[-1]] = inner = _as_container(old, path, parts[i + 1])
        if not inner and old is not inner:  # replaces the value of the file
            document.lines.pop(path, None)
        target = inner
    for below in [known for known in document.lines if known[: len(path)] == path]:
        del document.lines[below]  # the values of the file are replaced
    document.overrides.pop(path, None)
    document.overrides[path] = setting


def _key_of(target: Any, part: str, place: str) -> str | int:
    if isinstance(target, dict):
        return part
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(target):
        raise UserError(f"{place} has {len(target)} entries: write an index below that, not {part!r}")
    return int(part)


def _as_container(inner: Any, path: KeyPath, next_part: str) -> Any:
    """The mapping or list that a dotted override goes into. A short form (`model: 10M`, `web: data/`) is expanded."""
    if isinstance(inner, dict) or (isinstance(inner, list) and next_part.isdecimal()):
        return inner
    if path == ("model",) and isinstance(inner, str):
        return {"preset": inner}
    if path[:2] == ("data", "sources") and len(path) == 3 and isinstance(inner, (str, list)):
        return {"path": inner}
    return inner if isinstance(inner, list) else {}


def edit_text(text: str, key: str, value: str) -> str:
    """The YAML text with one dotted key set to `value`, which is YAML on one line. Comments, order and everything else
    stay as they are."""
    parts, node = key.split("."), _compose(text, key)
    if node is None:
        return text + f"{_nested(parts, value)}\n"
    while parts and isinstance(node, yaml.MappingNode):
        inner = next((item for name, item in node.value if name.value == parts[0]), None)
        if inner is None:
            return _insert(text, node, parts, value)
        node, parts = inner, parts[1:]
    return text[: node.start_mark.index] + _nested(parts, value, flow=True) + text[node.end_mark.index :]


def _nested(parts: list[str], value: str, flow: bool = False, indent: str = "") -> str:
    """`a: {b: value}` in block or flow style; without parts the value."""
    if not parts:
        return value
    if flow:
        return f"{{{parts[0]}: {_nested(parts[1:], value, flow=True)}}}"
    inner = _nested(parts[1:], value, indent=indent + "  ")
    return f"{parts[0]}:\n{indent}  {inner}" if parts[1:] else f"{parts[0]}: {inner}"


def _insert(text: str, node: yaml.MappingNode, parts: list[str], value: str) -> str:
    """Before the first key of a mapping in its style; at the end of the document's own mapping."""
    if node.flow_style:
        at = node.start_mark.index + 1
        rest = ", " if node.value else ""
        return f"{text[:at]}{_nested(parts, value, flow=True)[1:-1]}{rest}{text[at:]}"
    first = node.value[0][0].start_mark
    if first.column == 0:
        return f"{text.rstrip()}\n{_nested(parts, value)}\n"
    indent = " " * first.column
    return f"{text[: first.index]}{_nested(parts, value, indent=indent)}\n{indent}{text[first.index :]}"
