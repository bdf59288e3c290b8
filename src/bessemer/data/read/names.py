"""What a file's name says of its format."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Mapping
from typing import get_args

from bessemer.errors import UserError
from bessemer.spec.data import Format

_PROSE = (".txt", ".md", ".rst")
# fmt: off
_CODE = (
    ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".rs", ".go", ".zig", ".nim",
    ".java", ".kt", ".scala", ".clj", ".swift", ".m", ".mm", ".cs", ".fs", ".dart", ".js", ".mjs", ".jsx", ".ts",
    ".tsx", ".vue", ".html", ".css", ".scss", ".rb", ".php", ".pl", ".pm", ".lua", ".r", ".jl", ".hs", ".ml",
    ".mli", ".ex", ".exs", ".erl", ".sh", ".bash", ".zsh", ".ps1", ".sql", ".tex", ".f90", ".asm", ".s", ".proto",
    ".cmake", ".toml", ".yaml", ".yml",
)
# fmt: on
# What a folder of each format is taken to consist of.
EXTENSIONS: dict[Format, tuple[str, ...]] = {
    "text": (".txt", ".md"),
    "source": _CODE + _PROSE,
    "jsonl": (".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv", ".tab"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc", ".arrows"),
    "hf": (".arrow",),
    "webdataset": (".tar", ".tgz"),
    "mds": (".mds",),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfrec"),
    "warc": (".warc", ".wet"),
    "html": (".html", ".htm", ".xhtml"),
}
_BY_EXTENSION: dict[str, Format] = {
    extension: kind
    for kind in get_args(Format)
    if kind not in ("source", "hf", "text")
    for extension in EXTENSIONS[kind]
}
_PACKED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_TEXTS: tuple[Format, ...] = ("text", "source", "html")


def extension_of(path: str) -> str:
    """In lower case, without the suffix of a compression: `a/B.JSONL.gz` gives `.jsonl`."""
    name = path.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def format_of_file(path: str) -> Format:
    """The format of a file that is named itself; UserError where the name does not tell."""
    extension = extension_of(path)
    if extension in _BY_EXTENSION:
        return _BY_EXTENSION[extension]
    if extension in _PROSE or extension in _CODE:
        return "text" if extension in _PROSE else "source"
    rest = ", ".join(kind for kind in get_args(Format) if kind not in ("text", "source", "jsonl"))
    fix = f"set format to text, source, jsonl (one object per line) or one of {rest}"
    raise UserError(f"{path}: the name does not tell the format; {fix}")


def format_of_folder(root: str, sizes: Mapping[str, int]) -> Format:
    """The kind with the most bytes, so that one stray fixture does not decide for a tree of code."""
    size_bytes: Counter[Format] = Counter()
    code = False
    for name, size in sizes.items():
        extension = extension_of(name)
        kind = _BY_EXTENSION.get(extension)
        if kind is None and extension in EXTENSIONS["source"]:
            kind = "text"
            code = code or extension in _CODE
        if kind is not None:
            size_bytes[kind] += size
    if not size_bytes:
        return "text"
    most = size_bytes.most_common(1)[0][0]
    tables = sorted(kind for kind in size_bytes if kind not in _TEXTS and size_bytes[kind])
    if most not in _TEXTS and len(tables) > 1:
        names = " and ".join(tables)
        raise UserError(f"{root}: holds {names} files, maybe the same rows twice; set format or include")
    return "source" if most == "text" and code else most


def matches(path: str, pattern: str) -> bool:
    """As in .gitignore: without a slash it is for the name at any depth, with a slash for the whole path."""
    if "/" not in pattern:
        return fnmatch.fnmatchcase(os.path.basename(path), pattern)
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.replace("**/", ""))
