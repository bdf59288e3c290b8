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
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)(e[-+]?[0-9]+)?", re.I)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.I)
_LONGEST_NUMBER = 64  # longer digits stay text: Python itself refuses to convert thousands of them
_UNWANTED = re.compile("[\0-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # no path or name may hold them
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")}
_MERGE = "tag:yaml.org,2002:merge"
_VALUE = "tag:yaml.org,2002:value"
_DEEPEST, _MOST_PARTS = 50, 100_000  # aliases can make a small file endless


@dataclass
class Document:
    """Plain data and where each part of it was written."""

    data: Any
    name: str
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[tuple[Path, int, str]] = field(default_factory=list)
    overrides: dict[Path, str] = field(default_factory=dict)

    def _written(self, path: Path) -> Path | None:
        """The nearest part that the file or a setting speaks of; for a part that only settings opened, the setting."""
        if path and path not in self.overrides and path not in self.lines:
            below = next((known for known in self.overrides if known[: len(path)] == path), None)
            if below is not None:
                return below
        ends = range(len(path), -1, -1)
        return next((path[:end] for end in ends if path[:end] in self.overrides or path[:end] in self.lines), None)

    def place(self, path: Path) -> str:
        """`file:line` of the nearest part that was written, or the `--set` that gave it."""
        near = self._written(path)
        if near is None:
            return self.name
        return f"--set {self.overrides[near]}" if near in self.overrides else f"{self.name}:{self.lines[near]}"

    def rank(self, path: Path) -> tuple[int, int]:
        """Sorts messages: by line, then the settings of the command line as they were given."""
        near = self._written(path)
        if near in self.overrides:
            return 1, list(self.overrides).index(near)
        return 0, self.lines[near] if near is not None else 0


def scalar(text: str) -> Any:
    """What an unquoted word means: a number, true, false, nothing, or the word itself."""
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if text in ("", "~") or text.lower() == "null":
        return None
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Reader:
    """From YAML's nodes to plain data; notes lines and problems in the document as it goes."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.parts = 0

    def plain(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(path, line)
        self.parts += 1
        if len(path) > _DEEPEST or self.parts > _MOST_PARTS:
            raise UserError(f"{self.document.name}:{line}: nested too deeply; a spec is a few levels of keys")
        if node.tag not in _TAGS and node.tag not in (_MERGE, _VALUE):
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            self._problem(path, line, f"the tag {tag.strip('!')!r} is not read: write the value itself")
        if isinstance(node, yaml.ScalarNode):
            text = self._clean(node.value, path, line)
            return text if node.style in ("'", '"', "|", ">") else scalar(text)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, line, "a key must be a plain word")
                continue
            if key_node.tag == _MERGE:
                self._problem(path, line, "merge keys (<<) are not read: repeat the keys here")
                continue
            key = self._clean(key_node.value, path, line)
            if key in result:
                first = self.document.lines[(*path, key)]
                self._problem((*path, key), line, f"written twice, first in line {first}: remove one")
                continue
            self.document.lines[(*path, key)] = line
            result[key] = self.plain(value_node, (*path, key))
        return result

    def _clean(self, text: str, path: Path, line: int) -> str:
        found = _UNWANTED.search(text)
        if found:
            self._problem(path, line, f"contains the control character {found[0]!r}: remove it")
        return _UNWANTED.sub("_", text)

    def _problem(self, path: Path, line: int, message: str) -> None:
        self.document.problems.append((path, line, message))


def _compose(text: str, name: str) -> yaml.Node | None:
    """YAML's own tree. Its loader raises more than YAMLError: ValueError for a bad escape, RecursionError for depth."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        what = " ".join((error.problem or str(error)).split())
        raise UserError(f"{name}{line}: not YAML: {what}; check quotes, colons and indentation") from None
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        found = chr(error.character) if isinstance(error.character, int) else error.character
        raise UserError(f"{name}:{line_number}: not text: the character {found!r} is not allowed") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply; a spec is a few levels of keys") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}; check quotes and escapes") from None


def parse(text: str, name: str) -> Document:
    """YAML text to data with lines. A syntax error is a UserError with its line."""
    document = Document(None, name)
    node = _compose(text, name)
    document.data = {} if node is None else _Reader(document).plain(node, ())
    if not isinstance(document.data, dict):
        raise UserError(f"{name}:{document.lines[()]}: a spec is a mapping of keys such as model, data and budget")
    return document


def override(document: Document, setting: str) -> None:
    """Apply one `a.b=c`; c is read as YAML, so numbers, lists and `auto` work."""
    name = f"--set {setting}"
    key, equals, text = setting.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UserError(f"{name}: write it as key=value, such as --set optimizer.lr=3e-4")
    node = _compose(text, name)
    given = Document(None, name)
    value = None if node is None else _Reader(given).plain(node, ())
    if given.problems:
        raise UserError(f"{name}: {given.problems[0][2]}")
    target, path = document.data, tuple[str | int, ...]()
    for i, part in enumerate(parts):
        path = (*path, _step(target, part, f"{name}: {'.'.join(parts[:i])}"))
        if i == len(parts) - 1:
            target[path[-1]] = value
            break
        former = target.get(part) if isinstance(target, dict) else target[path[-1]]
        target[path[-1]] = inner = _opened(former, path, parts[i + 1])
        if not inner and former is not inner:  # what the file said here is replaced
            document.lines.pop(path, None)
        target = inner
    for below in [known for known in document.lines if known[: len(path)] == path]:
        del document.lines[below]  # what the file said there no longer counts
    document.overrides.pop(path, None)
    document.overrides[path] = setting


def _step(target: Any, part: str, place: str) -> str | int:
    if isinstance(target, dict):
        return part
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(target):
        raise UserError(f"{place} has {len(target)} entries: write a number below that, not {part!r}")
    return int(part)


def _opened(inner: Any, path: Path, next_part: str) -> Any:
    """What a dotted override goes into. A short form (`model: 10M`, `web: data/`) keeps what it said."""
    if isinstance(inner, dict) or (isinstance(inner, list) and next_part.isdecimal()):
        return inner
    if path == ("model",) and isinstance(inner, str):
        return {"preset": inner}
    if path[:2] == ("data", "sources") and len(path) == 3 and isinstance(inner, (str, list)):
        return {"path": inner}
    return inner if isinstance(inner, list) else {}
