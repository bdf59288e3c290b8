"""YAML with line numbers, read the way people mean it.

Plain PyYAML reads `1e-4` as a string, `no` as False, and lets a second key silently replace the first. Here numbers are
numbers, only true/false are booleans, duplicate keys are refused, and each key's line is kept for the messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from bessemer.errors import UserError

Path = tuple[str | int, ...]
_BOOL = {"true": True, "false": False}
_INT = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|nan)$")


@dataclass
class Document:
    """Plain data and where each part of it was written."""

    data: Any
    name: str
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[tuple[Path, int, str]] = field(default_factory=list)
    overrides: dict[Path, str] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """Line of the nearest part that was written; 0 where only the command line speaks of it."""
        return next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), 0)

    def place(self, path: Path) -> str:
        """`file:line` of the nearest part that was written, or the `--set` that gave it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.overrides:
                return f"--set {self.overrides[path[:end]]}"
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
        return self.name


def _scalar(text: str) -> Any:
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if text in ("", "~") or text.lower() == "null":
        return None
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text


def _plain(node: yaml.Node, path: Path, document: Document) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, i), document) for i, item in enumerate(node.value)]
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append((path, line, "a key must be a plain word"))
            continue
        key = key_node.value
        if key in result:
            first = document.lines[(*path, key)]
            document.problems.append(((*path, key), line, f"written twice, first in line {first}: remove one"))
            continue
        document.lines[(*path, key)] = line
        result[key] = _plain(value_node, (*path, key), document)
    return result


def parse(text: str, name: str) -> Document:
    """YAML text to data with lines. A syntax error is a UserError with its line."""
    document = Document(None, name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: not YAML: {error.problem or error}; check quotes, colons and indentation") from None
    except yaml.YAMLError as error:  # for example a control character: it has no mark
        raise UserError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None
    document.data = {} if node is None else _plain(node, (), document)
    if not isinstance(document.data, dict):
        raise UserError(f"{name}:1: a spec is a mapping of keys such as model, data and budget")
    return document


def override(document: Document, setting: str) -> None:
    """Apply one `a.b=c`; c is read as YAML, so numbers, lists and `auto` work."""
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {setting}: write it as key=value, such as --set optimizer.lr=3e-4")
    path: list[str | int] = []
    target: Any = document.data
    parts = key.strip().split(".")
    for i, part in enumerate(parts):
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                raise UserError(f"--set {setting}: {'.'.join(parts[:i])} has {len(target)} entries; use a number below that")
            step: str | int = int(part)
        else:
            step = part
        path.append(step)
        if i == len(parts) - 1:
            target[step] = parse(f"value: {value}", f"--set {setting}").data["value"]
        else:
            inner = target[step] if isinstance(target, list) else target.get(part)
            if not isinstance(inner, (dict, list)):
                # `model: 10M` is short for a mapping; a dotted override of a short form keeps what was short.
                inner = {"preset": inner} if part == "model" and isinstance(inner, str) else {}
                target[step] = inner
            target = inner
    document.overrides[tuple(path)] = setting
