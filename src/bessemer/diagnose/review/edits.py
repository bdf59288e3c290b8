"""Changes of a source text: spans that are replaced, applied together where they do not overlap, shown as a diff."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class SourceEdit:
    """Replaces the characters from `start` to `end` with `text`."""

    start: int
    end: int
    text: str


class SourceText:
    """A text whose syntax nodes are addressed by character offsets (ast counts UTF-8 bytes)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def _offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line_span(self, first: ast.stmt, last: ast.stmt | None = None) -> tuple[int, int]:
        """The complete lines of a statement, or of several that follow one another, with decorators and line end."""
        decorators = getattr(first, "decorator_list", [])
        begin = min([first.lineno, *(decorator.lineno for decorator in decorators)])
        end = (last or first).end_lineno
        assert end is not None
        return self.starts[begin - 1], min(self.starts[end], len(self.text))

    def indent_of(self, statement: ast.stmt) -> str:
        line = self.lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> SourceEdit:
        return SourceEdit(*self.span(node), text)

    def before(self, statement: ast.stmt, text: str) -> SourceEdit:
        """Insert lines above a statement, at its indentation."""
        start = self.line_span(statement)[0]
        return SourceEdit(start, start, textwrap.indent(text + "\n", self.indent_of(statement)))

    def after(self, statement: ast.stmt, text: str) -> SourceEdit:
        """Insert lines below a statement, at its indentation."""
        end = self.line_span(statement)[1]
        line_end = "" if self.text[:end].endswith("\n") else "\n"
        return SourceEdit(end, end, line_end + textwrap.indent(text + "\n", self.indent_of(statement)))

    def remove(self, statement: ast.stmt, alone: bool) -> SourceEdit:
        """Remove a statement's lines; `alone` says that its block would be empty without it."""
        start, end = self.line_span(statement)
        return SourceEdit(start, end, self.indent_of(statement) + "pass\n" if alone else "")

    def body(self, statements: list[ast.stmt]) -> str:
        """The lines of statements that follow one another, without their indentation."""
        start, end = self.line_span(statements[0], statements[-1])
        return textwrap.dedent(self.text[start:end]).rstrip("\n")

    def wrap(self, statements: list[ast.stmt], header: str) -> SourceEdit:
        """Put statements that follow one another below a header such as `with torch.no_grad():`."""
        start, end = self.line_span(statements[0], statements[-1])
        lines = header + "\n" + textwrap.indent(self.body(statements), "    ") + "\n"
        return SourceEdit(start, end, textwrap.indent(lines, self.indent_of(statements[0])))


def apply_edits(text: str, edits: Iterable[SourceEdit]) -> str | None:
    """The changed text; None if two edits overlap or the result is no Python."""
    chosen = sorted(set(edits))
    for left, right in zip(chosen, chosen[1:], strict=False):
        if right.start < left.end:
            return None
    for edit in reversed(chosen):
        text = text[: edit.start] + edit.text + text[edit.end :]
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return text


def unified_diff(before: str, after: str, path: str) -> str:
    """A patch for `git apply` and `patch -p1`; empty if nothing changes."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)
