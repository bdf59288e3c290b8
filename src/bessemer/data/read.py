"""The first step of the data path: which files a source names, and the documents in them, one at a time.

Everything streams: memory is bounded by the largest document, never by the size of a file or of the corpus.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

from bessemer.errors import UserError
from bessemer.spec.data import Format

if TYPE_CHECKING:
    from bessemer.spec.data import SourceSpec

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
_EXTENSIONS: dict[Format, tuple[str, ...]] = {
    "text": (".txt", ".md"),
    "source": _CODE + _PROSE,
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}  # and hidden ones, such as .git
_SOURCE_FILE_LIMIT_BYTES = 1_000_000  # a longer file in a source tree is nearly always generated
_PARQUET_BATCH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from. `row` counts from 1: lines of JSONL, rows of Parquet; 1 for a file."""

    text: str
    file: str
    row: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a source; `path` is absolute."""

    path: str
    size_bytes: int
    format: Format
    mtime_ns: int


def list_files(source: SourceSpec) -> list[FileEntry]:
    """Every file that the source names, sorted by path, each once.

    A folder is walked without following links to folders. What a path or glob names itself is always taken; what
    a walk finds has to match `include`, or else the extensions of the format.
    """
    found: dict[str, Format] = {}
    for pattern in source.path:
        for path in _expand(pattern):
            if os.path.isdir(path):
                found.update(_walk_folder(path, source))
            else:
                found[path] = _format_of_file(path) if source.format == "auto" else source.format
    entries = []
    for path in sorted(found):
        stat = os.stat(path)
        entries.append(FileEntry(path, stat.st_size, found[path], stat.st_mtime_ns))
    return entries


def read_documents(files: Iterable[FileEntry], source: SourceSpec) -> Iterator[Document]:
    """The documents of `files` in order. Empty ones (no text, null, only white space) are passed over.

    A row that cannot be used raises UserError with its file and row.
    """
    for entry in files:
        try:
            if entry.format == "jsonl":
                rows = _read_jsonl(entry.path, source.text_field)
            elif entry.format == "parquet":
                rows = _read_parquet(entry.path, source.text_field)
            else:
                rows = _read_whole(entry.path)
            for row, text in rows:
                if text and not text.isspace():
                    yield Document(text, entry.path, row)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{entry.path}: cannot be read ({error}); restore it or leave it out") from error


def _expand(pattern: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        matches = sorted(match for match in glob.glob(path, recursive=True) if os.path.exists(match))
        if matches:
            return matches
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        names = []
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    what = "nothing matches" if glob.has_magic(path) else "no such file or folder:"
    raise UserError(f"{what} {path}; {parent} holds {shown or 'nothing readable'}; correct the path")


def _walk_folder(root: str, source: SourceSpec) -> dict[str, Format]:
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        relative = os.path.relpath(folder, root)
        for name in files:
            path = name if relative == "." else f"{relative}/{name}"
            if not name.startswith(".") and os.path.isfile(os.path.join(root, path)):
                names.append(path)
    names = [name for name in names if not any(_matches(name, pattern) for pattern in source.exclude)]
    wanted = [name for name in names if not source.include or any(_matches(name, p) for p in source.include)]
    kind = _format_of_folder(root, wanted) if source.format == "auto" else source.format
    if not source.include:
        wanted = [name for name in wanted if _extension(name) in _EXTENSIONS[kind]]
    paths = [os.path.join(root, name) for name in wanted]
    if kind == "source":
        paths = [path for path in paths if _looks_like_source(path)]
    if not paths:
        counts = Counter(_extension(name) or "no extension" for name in names).most_common(5)
        seen = ", ".join(f"{count} x {extension}" for extension, count in counts) or "no files"
        asked = " ".join(source.include) or " ".join(_EXTENSIONS[kind][:8])
        raise UserError(f"{root}: no {kind} file to read ({asked}); it holds {seen}; set format or include")
    return dict.fromkeys(paths, kind)


def _matches(path: str, pattern: str) -> bool:
    """As in .gitignore: without a slash it is for the name at any depth, with a slash for the whole path."""
    if "/" not in pattern:
        return fnmatch.fnmatchcase(os.path.basename(path), pattern)
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.replace("**/", ""))


def _extension(path: str) -> str:
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _format_of_file(path: str) -> Format:
    extension = _extension(path)
    if extension in _EXTENSIONS["jsonl"]:
        return "jsonl"
    if extension in _EXTENSIONS["parquet"]:
        return "parquet"
    if extension in _PROSE or extension in _CODE:
        return "text" if extension in _PROSE else "source"
    raise UserError(
        f"{path}: the name does not tell the format; "
        "set format to text, source, jsonl (one object per line) or parquet"
    )


def _format_of_folder(root: str, names: list[str]) -> Format:
    """The kind with the most bytes, so that one stray fixture does not decide for a tree of code."""
    size_bytes: Counter[Format] = Counter()
    code = False
    for name in names:
        extension = _extension(name)
        kind: Format = "text"
        if extension in _EXTENSIONS["jsonl"]:
            kind = "jsonl"
        elif extension in _EXTENSIONS["parquet"]:
            kind = "parquet"
        else:
            code = code or extension in _CODE
        if kind != "text" or extension in _EXTENSIONS["source"]:
            size_bytes[kind] += os.path.getsize(os.path.join(root, name))
    if size_bytes["jsonl"] and size_bytes["parquet"]:
        raise UserError(f"{root}: holds both JSONL and Parquet, maybe the same rows twice; set format")
    kind = size_bytes.most_common(1)[0][0] if size_bytes else "text"
    return "source" if kind == "text" and code else kind


def _looks_like_source(path: str) -> bool:
    if os.path.getsize(path) > _SOURCE_FILE_LIMIT_BYTES:
        return False
    with open(path, "rb") as file:
        return b"\0" not in file.read(8192)


def _open(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.lower().endswith(".gz") else open(path, "rb")


def _read_whole(path: str) -> Iterator[tuple[int, str]]:
    with _open(path) as file:
        yield 1, file.read().decode("utf-8-sig", errors="replace")


def _read_jsonl(path: str, field: str) -> Iterator[tuple[int, str | None]]:
    with _open(path) as file:
        for row, line in enumerate(file, start=1):
            if line.isspace():
                continue
            place = f"{path}:{row}"
            try:
                record = json.loads(line.decode("utf-8-sig" if row == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                array = row == 1 and line.lstrip()[:1] == b"["
                fix = "write one object per line, not an array" if array else "correct or delete this line"
                raise UserError(f"{place}: not valid JSON in UTF-8 ({error}); {fix}") from error
            if not isinstance(record, dict):
                raise UserError(
                    f'{place}: a {type(record).__name__}; each line must be like {{"{field}": "..."}}'
                )
            if field not in record:
                raise UserError(f"{place}: no field {field!r}; {_choose(record)}")
            text = record[field]
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"{place}: {field!r} holds a {type(text).__name__}, not text; {_choose(record)}"
                )
            # JSON can spell half a surrogate pair, which is no character and cannot be encoded.
            if text and (b"\\ud" in line or b"\\uD" in line):
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            yield row, text


def _read_parquet(path: str, field: str) -> Iterator[tuple[int, str | None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffered and not pre-buffered: a row group is decoded page by page instead of being held whole.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise UserError(f"{path}: no column {field!r}; {_choose(schema.names)}")
            kind = schema.field(field).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if kind not in (pa.string(), pa.large_string(), pa.string_view()):
                raise UserError(f"{path}: column {field!r} holds {kind}, not text; {_choose(schema.names)}")
            bytes_per_row = os.path.getsize(path) // max(file.metadata.num_rows, 1)
            batch_rows = min(max(_PARQUET_BATCH_BYTES // max(bytes_per_row, 1), 1), 4096)
            row = 0
            for batch in file.iter_batches(batch_rows, columns=[field], use_threads=False):
                for row, text in enumerate(batch.column(0), start=row + 1):  # noqa: B020 (goes on counting)
                    yield row, text.as_py()
    except pa.ArrowException as error:
        raise UserError(f"{path}: not readable as Parquet ({error}); restore it or leave it out") from error


def _choose(names: Iterable[str]) -> str:
    return f"it has {', '.join(map(repr, names)) or 'none'}: set text_field to the one that holds the text"
