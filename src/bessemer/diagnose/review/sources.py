"""What `bessemer review` reads: Python files, the code cells of notebooks, and the Python files of folders."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.errors import UserError

LEFT_OUT = ("site-packages", "dist-packages", "node_modules", "__pycache__")
MAGIC = re.compile(r"(\s*)(\w[\w, ]*=\s*)?[%!?].*|(\s*)[\w.]+\?\??\s*")  # `%matplotlib`, `x = !ls`, `model?`
TIMING = re.compile(r"%%(time|timeit|capture|prun)\b")  # cell magics that run the rest of the cell as Python


@dataclass(frozen=True)
class SourceFile:
    """Python text of a file. `cells` holds the cell and line of each line of a notebook; it is empty for a script."""

    path: str
    text: str
    line_end: str = "\n"
    encoding: str = "utf-8"
    cells: tuple[tuple[int, int], ...] = ()

    def place(self, line: int) -> str:
        """`12`, or `cell 3:12` in a notebook."""
        return "cell {}:{}".format(*self.cells[line - 1]) if self.cells else str(line)

    def in_file(self, text: str) -> str:
        """A text with the line ends of the file, and its byte order mark if it has one."""
        mark = "\ufeff" if self.encoding == "utf-8-sig" else ""
        return mark + text.replace("\n", self.line_end)

    def content(self, text: str) -> bytes:
        """What the file holds for a text."""
        return self.in_file(text).encode("utf-8" if self.encoding == "utf-8-sig" else self.encoding)


def script_paths(paths: list[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file once, with whether it was met in a folder."""
    met = set[Path]()
    for path in paths:
        files = python_files(path) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path}: holds no Python file")
        for file in files:
            if file.resolve() not in met:
                met.add(file.resolve())
                yield file, path.is_dir()


def python_files(folder: Path) -> list[Path]:
    """The *.py of a folder and those below it, without hidden folders, installed packages and empty files."""
    files = []
    for file in sorted(folder.rglob("*.py")):
        parents = file.relative_to(folder).parts[:-1]
        if not any(part.startswith(".") or part in LEFT_OUT for part in parents) and file.is_file():
            files += [file] if file.stat().st_size > 2 else []  # no more than a line end: an empty __init__.py
    return files


def read_source(path: Path) -> SourceFile:
    """UserError if a file is missing, empty or not Python."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a Python file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {(error.strerror or 'unknown reason').lower()}") from None
    if not raw.strip():
        raise UserError(f"{path}: is empty")
    if path.suffix == ".ipynb":
        return read_notebook(path, raw)
    if path.suffix not in (".py", ".pyw") and not (raw.startswith(b"#!") and b"python" in raw.split(b"\n")[0]):
        raise UserError(f"{path}: is not Python; `bessemer review` reads .py and .ipynb files and folders of .py files")
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        raise UserError(f"{path}: is not a text in UTF-8, the encoding of Python files") from None
    if "\0" in text:
        raise UserError(f"{path}: is not a text")
    line_end = "\r\n" if "\r\n" in text else "\n"
    return SourceFile(str(path), text.replace("\r\n", "\n").replace("\r", "\n"), line_end, encoding)


def read_notebook(path: Path, raw: bytes) -> SourceFile:
    """The code cells, one after another; magics and commands of the shell become empty statements."""
    try:
        notebook = json.loads(raw)
        cells = notebook["cells"]
        codes = [(number, cell_text(cell)) for number, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
        language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is not a notebook of format 4") from None
    if language != "python":
        raise UserError(f"{path}: is a notebook of {language}, not of Python")
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, text in codes:
        for line, content in enumerate(python_lines(text), 1):
            lines.append(content)
            places.append((number, line))
    if not any(lines):
        raise UserError(f"{path}: has no Python code")
    return SourceFile(str(path), "\n".join(lines), cells=(*places, places[-1]))


def cell_text(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def python_lines(text: str) -> list[str]:
    """The lines of a cell. Magics are replaced only in a cell that is no Python: `% x` may continue an expression."""
    lines = text.replace("\r\n", "\n").split("\n")
    if TIMING.match(lines[0]):
        lines[0] = ""
    if lines[0].startswith("%%"):
        return [""] * len(lines)
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return [without_magic(line) for line in lines]
    return lines


def without_magic(line: str) -> str:
    match = MAGIC.fullmatch(line)
    if match is None:
        return line
    indent, target = match[1] or match[3] or "", match[2]
    return f"{indent}{target}None" if target else f"{indent}pass"
