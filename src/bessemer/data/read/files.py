"""Lists the files of a source: paths, globs, folders and URLs, sorted, each once. A file that a path or glob names
directly is always taken; a file found in a folder must match `include` or the extensions of the format."""

from __future__ import annotations

import errno
import fnmatch
import glob
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK
from typing import Any, get_args
from urllib.parse import urlsplit

from bessemer.data.read.entry import FileEntry
from bessemer.data.read.remote import RemoteEntry, RemoteLocation, is_url, is_web, protocol_of
from bessemer.data.read.secrets import check_storage_options, redact, redact_message
from bessemer.errors import UserError
from bessemer.spec.data import Format, SourceSpec

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
# The files that a folder of each format consists of.
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
_COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_TEXT_FORMATS: tuple[Format, ...] = ("text", "source", "html")


def extension_of(path: str) -> str:
    """The extension in lower case, without a compression suffix: `a/B.JSONL.gz` gives `.jsonl`."""
    name = path.lower()
    for packed in _COMPRESSED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def format_of_file(path: str) -> Format:
    """The format of a file that the source names directly; UserError where the name does not tell."""
    extension = extension_of(path)
    if extension in _BY_EXTENSION:
        return _BY_EXTENSION[extension]
    if extension in _PROSE or extension in _CODE:
        return "text" if extension in _PROSE else "source"
    others = ", ".join(name for name in get_args(Format) if name not in ("text", "source", "jsonl"))
    fix = f"set format to text, source, jsonl (one object per line) or one of {others}"
    raise UserError(f"{path}: the name does not tell the format; {fix}")


def format_of_folder(root: str, sizes: Mapping[str, int]) -> Format:
    """The format with the most bytes, so that one stray fixture does not decide for a tree of code."""
    size_bytes: Counter[Format] = Counter()
    has_code = False
    for name, size in sizes.items():
        extension = extension_of(name)
        if extension in _BY_EXTENSION:
            size_bytes[_BY_EXTENSION[extension]] += size
        elif extension in EXTENSIONS["source"]:
            size_bytes["text"] += size
            has_code = has_code or extension in _CODE
    if not size_bytes:
        return "text"
    most = size_bytes.most_common(1)[0][0]
    tables = sorted(name for name in size_bytes if name not in _TEXT_FORMATS and size_bytes[name])
    if most not in _TEXT_FORMATS and len(tables) > 1:
        names = " and ".join(tables)
        raise UserError(f"{root}: holds {names} files, maybe the same rows twice; set format or include")
    return "source" if most == "text" and has_code else most


def matches(path: str, pattern: str) -> bool:
    """As in .gitignore: a pattern without a slash matches the base name at any depth, others the whole path."""
    if "/" not in pattern:
        return fnmatch.fnmatchcase(os.path.basename(path), pattern)
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.replace("**/", ""))


_SOURCE_FILE_LIMIT_BYTES = 1_000_000  # a longer file in a source tree is almost always generated
_SNIFF_BYTES = 8192
_SPLIT = re.compile(r"(?:^|/)(train|test|validation|valid|val|dev)(?:[-_./])", re.IGNORECASE)

Say = Callable[[str], None] | None


@dataclass(frozen=True)
class Folder:
    """The files below a folder, by their path inside it, and ways to read them."""

    root: str
    files: dict[str, RemoteEntry]
    read: Callable[[str], bytes]  # a small file
    heads: Callable[[list[str], int], list[bytes]]  # the first bytes of many


def choose(folder: Folder, source: SourceSpec, say: Say = None) -> list[tuple[RemoteEntry, Format]]:
    """The files to read, sorted by name; UserError where there is none."""
    names = [name for name in sorted(folder.files) if not _matches_any(name, source.exclude)]
    included = [name for name in names if is_wanted(name, source)]
    format = source.format
    if format == "auto":
        format = format_of_folder(folder.root, {name: folder.files[name].size_bytes for name in included})
        states = {posixpath.join(posixpath.dirname(name), "state.json") for name in included}
        if format == "arrow" and not states.isdisjoint(folder.files):
            format = "hf"
    if format == "hf":
        chosen = _saved_dataset(folder, names, source, say)
    elif format == "mds":
        chosen = _shards(folder, included)
    elif source.include:
        chosen = included
    else:
        chosen = [name for name in included if extension_of(name) in EXTENSIONS[format]]
        if not chosen and source.format == "jsonl":  # many corpora call their JSON lines .json.gz
            chosen = [name for name in included if extension_of(name) == ".json"]
    if format == "source":
        small = [name for name in chosen if folder.files[name].size_bytes <= _SOURCE_FILE_LIMIT_BYTES]
        heads = folder.heads([folder.files[name].path for name in small], _SNIFF_BYTES)
        chosen = [name for name, head in zip(small, heads, strict=True) if b"\0" not in head]
    if not chosen:
        counts = Counter(extension_of(name) or "no extension" for name in names).most_common(5)
        contents = ", ".join(f"{count} x {extension}" for extension, count in counts) or "no files"
        patterns = " ".join(source.include) or " ".join(EXTENSIONS[format][:8])
        problem = f"{folder.root}: no {format} file to read ({patterns}); it holds {contents}"
        raise UserError(f"{problem}; set format or include")
    if say and format != "hf" and not (source.include or source.exclude):
        _warn_about_splits(folder, chosen, say)
    return [(folder.files[name], format) for name in chosen]


def is_wanted(name: str, source: SourceSpec) -> bool:
    """Whether `include` and `exclude` let a file in."""
    return not _matches_any(name, source.exclude) and (not source.include or _matches_any(name, source.include))


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _saved_dataset(folder: Folder, names: list[str], source: SourceSpec, say: Say) -> list[str]:
    """The Arrow files that each saved dataset's state.json lists; others in the folder are left over from map()."""
    chosen = []
    for folder_path, state in _read_indexes(folder, "state.json"):
        if state.get("_indices_files"):
            raise UserError(
                f"{folder.root}/{folder_path}state.json: the dataset was saved with an index over its rows, which is "
                "not read; save it again with dataset.flatten_indices().save_to_disk(...)"
            )
        shards = [folder_path + entry["filename"] for entry in state.get("_data_files") or []]
        _check_exist(folder, f"{folder_path}state.json", shards)
        chosen += shards
    chosen = [name for name in chosen if name in set(names)]
    if source.include:
        return [name for name in chosen if _matches_any(name, source.include)]
    for folder_path, described in _read_indexes(folder, "dataset_dict.json"):
        splits = [str(split) for split in described.get("splits") or []]
        others = [split for split in splits if split != "train"]
        root = posixpath.join(folder.root, folder_path).rstrip("/")
        if "train" in splits:
            train = f"{folder_path}train/"
            chosen = [name for name in chosen if not name.startswith(folder_path) or name.startswith(train)]
            if say and others:
                fix = f"`include: ['{folder_path}{others[0]}/*']` reads another"
                say(f"{root}: a DatasetDict: only its split train is read, not {', '.join(others)}; {fix}")
        elif say and len(others) > 1:
            fix = f"`include: ['{folder_path}{others[0]}/*']` reads one of them"
            say(f"{root}: a DatasetDict without a split train: all its splits are read ({', '.join(others)}); {fix}")
    return sorted(chosen)


def _warn_about_splits(folder: Folder, names: list[str], say: Callable[[str], None]) -> None:
    """Warns where held-out splits are among the files to train on, as datasets are often published."""
    splits = dict.fromkeys(match[1].lower() for name in names if (match := _SPLIT.search(name)))
    if "train" in splits and len(splits) > 1:
        warning = f"{folder.root}: files of several splits are read ({', '.join(splits)})"
        say(f"{warning}; `include: ['*train*']` or `exclude` leaves the others out")


def _shards(folder: Folder, included: list[str]) -> list[str]:
    """The shards that each index.json lists; the uncompressed form where both exist."""
    chosen = set()
    for folder_path, index in _read_indexes(folder, "index.json"):
        for shard in index.get("shards") or []:
            forms = [folder_path + form["basename"] for key in ("raw_data", "zip_data") if (form := shard.get(key))]
            present = [name for name in forms if name in folder.files]
            _check_exist(folder, f"{folder_path}index.json", present[:1] or forms[:1])
            chosen.add(present[0])
    return sorted(chosen.intersection(included))


def _read_indexes(folder: Folder, index_name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file of that name below the folder: the folder it describes, and its content."""
    for name in sorted(folder.files):
        if posixpath.basename(name) != index_name:
            continue
        try:
            index = json.loads(folder.read(folder.files[name].path))
        except ValueError as error:
            raise UserError(f"{folder.root}/{name}: not valid JSON ({error}); restore it") from error
        if isinstance(index, dict):
            yield name[: -len(index_name)], index


def _check_exist(folder: Folder, index: str, names: list[str]) -> None:
    missing = [name for name in names if name not in folder.files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"{folder.root}/{index} names {missing[0]}{more}, not there"
        raise UserError(f"{problem}; restore or copy it again")


Skip = Callable[[str, str], None] | None

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}  # as well as hidden ones, such as .git


def list_files(source: SourceSpec, say: Say = None, skip: Skip = None) -> list[FileEntry]:
    """Every file that the source names. Folders are walked without following links to folders. A saved Hugging Face
    dataset or MDS dataset consists of the files in its index; a DatasetDict with a split `train`, of that split unless
    `include` selects others. `say` receives a line about which splits are read; `skip` receives the path of each folder
    entry that cannot be read (a broken link, a named pipe), and the reason."""
    check_storage_options(source.storage)
    entries: dict[str, FileEntry] = {}
    for pattern in source.path:
        if is_url(pattern) and protocol_of(pattern) not in ("file", "local"):
            try:
                listing = list(_list_remote(pattern, source, say))
            except OSError as error:
                raise UserError(f"{redact(pattern)}: cannot be listed ({redact_message(error)})") from error
        else:
            listing = list(_list_local(pattern.partition("://")[2] or pattern, source, say, skip))
        for entry, format in listing:
            entries[entry.path] = FileEntry(entry.path, entry.size_bytes, format, entry.mtime_ns, entry.version)
    return [entries[path] for path in sorted(entries)]


def _list_local(pattern: str, source: SourceSpec, say: Say, skip: Skip) -> Iterator[tuple[RemoteEntry, Format]]:
    for path in _expand(pattern, skip):
        if os.path.isdir(path):
            folder, unreadable = _local_folder(path)
            for name, reason in unreadable.items():
                if skip and is_wanted(name, source):
                    skip(os.path.join(path, name), reason)
            try:
                yield from choose(folder, source, say)
            except UserError as error:
                if not unreadable:
                    raise
                name, reason = next(iter(unreadable.items()))
                raise UserError(f"{error}; {name} was skipped: it is {reason}") from error
        else:
            yield _stat(path), _format(path, source)


def _list_remote(pattern: str, source: SourceSpec, say: Say) -> Iterator[tuple[RemoteEntry, Format]]:
    location = RemoteLocation.of(pattern, source.storage)
    is_web_url = is_web(pattern)
    # In a web address `?` begins the query.
    is_glob = glob.has_magic(location.path) and ("*" in location.path or not is_web_url)
    matched: dict[str, RemoteEntry | None] = location.expand() if is_glob else {}
    if not matched and is_web_url and urlsplit(pattern).path.endswith("/"):
        matched = {location.path: None}
    if not matched:
        try:
            matched = {location.path: location.describe()}
        except FileNotFoundError:
            raise _missing_remote(location, is_glob) from None
    for path, entry in matched.items():
        if entry is not None:
            yield entry, _format(urlsplit(path).path if is_web_url else path, source)
            continue
        files = {name: inner for name, inner in location.walk(path).items() if not _is_skipped(name)}
        root = redact(location.prefix + path).rstrip("/")
        yield from choose(Folder(root, files, location.read_small, location.read_heads), source, say)


def _format(path: str, source: SourceSpec) -> Format:
    return format_of_file(redact(path)) if source.format == "auto" else source.format


def _stat(path: str) -> RemoteEntry:
    stat = os.stat(path)
    if not S_ISREG(stat.st_mode):
        raise UserError(f"{path}: {file_kind(path)}, which cannot be read twice; write its content to a file first")
    return RemoteEntry(path, stat.st_size, stat.st_mtime_ns)


def _expand(pattern: str, skip: Skip = None) -> list[str]:
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        matched = glob.glob(path, recursive=True)
        matches = sorted(match for match in matched if os.path.exists(match) and not ("**" in path and _loops(match)))
        broken = sorted(match for match in matched if not os.path.exists(match))
        if matches:
            if skip:
                for match in broken:
                    skip(match, _broken_link(match))
            return matches
        if broken:
            raise UserError(f"{broken[0]}: {_broken_link(broken[0])}; correct the link")
    if os.path.islink(path):
        raise UserError(f"{path}: {_broken_link(path)}; correct the link")
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        names = []
    raise _missing(path, parent, names, glob.has_magic(path))


def file_kind(path: str) -> str:
    """What a path is that is no regular file: opening it may block forever, or never end."""
    mode = os.stat(path).st_mode
    names = ("named pipe", "socket", "device", "device", "folder")
    tests = zip((S_ISFIFO, S_ISSOCK, S_ISCHR, S_ISBLK, S_ISDIR), names, strict=True)
    kind = next((f"a {name}" for test, name in tests if test(mode)), "no regular file")
    return f"a link to {kind} ({os.path.realpath(path)})" if os.path.islink(path) else kind


def _broken_link(path: str) -> str:
    """Why a link cannot be followed."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"a symbolic link that leads back to itself (through {os.readlink(path)})"
        return f"a symbolic link to {os.readlink(path)}, which cannot be reached ({error.strerror})"
    return "a symbolic link"


def _loops(path: str) -> bool:
    """Whether the path to a file passes through a link to a folder that it is already inside."""
    folder = os.path.dirname(path)
    while folder != os.path.dirname(folder):
        if os.path.islink(folder):
            inside, target = os.path.realpath(os.path.dirname(folder)), os.path.realpath(folder)
            if inside == target or inside.startswith(target.rstrip(os.sep) + os.sep):
                return True
        folder = os.path.dirname(folder)
    return False


def _missing_remote(location: RemoteLocation, is_glob: bool) -> UserError:
    parent = location.path.rstrip("/").rpartition("/")[0]
    while glob.has_magic(parent):
        parent = parent.rpartition("/")[0]
    names = location.names_in(parent) if parent else []
    return _missing(redact(location.url), redact(location.prefix + parent), names, is_glob)


def _missing(path: str, parent: str, names: list[str], is_glob: bool) -> UserError:
    contents = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    problem = "nothing matches" if is_glob else "no such file or folder:"
    return UserError(f"{problem} {path}; {parent} holds {contents or 'nothing readable'}; correct the path")


def _is_skipped(name: str) -> bool:
    *folders, basename = name.split("/")
    return basename.startswith(".") or any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in folders)


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename}: cannot be listed ({error.strerror}); allow it or leave it out") from error


def _local_folder(root: str) -> tuple[Folder, dict[str, str]]:
    """The files of a folder, and a description of each entry that is neither a folder nor a readable regular file."""
    files, unreadable = {}, {}
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_skipped(f"{name}/x")]
        relative = os.path.relpath(folder, root)
        for name in (name for name in names if not _is_skipped(name)):
            path = os.path.join(folder, name)
            inside = name if relative == "." else f"{relative}/{name}"
            if os.path.isfile(path):
                files[inside] = _stat(path)
            else:
                unreadable[inside] = file_kind(path) if os.path.exists(path) else _broken_link(path)

    def read(path: str, size_bytes: int = -1) -> bytes:
        with open(path, "rb") as file:
            return file.read(size_bytes)

    listing = Folder(root, files, read, lambda paths, size_bytes: [read(path, size_bytes) for path in paths])
    return listing, dict(sorted(unreadable.items()))
