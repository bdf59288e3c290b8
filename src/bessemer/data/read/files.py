"""What a file's name says of its format.

Which files of a folder a source takes, and as what: by patterns, extensions, and the index of a saved dataset.

Which files a source names: paths, globs, folders and URLs, sorted, each once. What a path or glob names itself is
always taken; what a walk of a folder finds has to match `include`, or else the extensions of the format.
"""

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
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from bessemer.data.read.entry import FileEntry
from bessemer.data.read.remote import RemoteEntry, RemoteLocation, is_url, is_web, protocol_of
from bessemer.data.read.secrets import check_storage, redacted, shown
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


if TYPE_CHECKING:
    from bessemer.spec.data import Format, SourceSpec

_SOURCE_FILE_LIMIT_BYTES = 1_000_000  # a longer file in a source tree is nearly always generated
_HEAD_BYTES = 8192
_SPLIT = re.compile(r"(?:^|/)(train|test|validation|valid|val|dev)(?:[-_./])", re.IGNORECASE)

Say = Callable[[str], None] | None


@dataclass(frozen=True)
class Folder:
    """The files below a folder, by their path inside it, and ways to look into them."""

    root: str
    files: dict[str, RemoteEntry]
    read: Callable[[str], bytes]  # a small file
    heads: Callable[[list[str], int], list[bytes]]  # the first bytes of many


def choose(folder: Folder, source: SourceSpec, say: Say = None) -> list[tuple[RemoteEntry, Format]]:
    """The files to read, in the order of their names. UserError where there is none."""
    names = [name for name in sorted(folder.files) if not _any(name, source.exclude)]
    wanted = [name for name in names if is_wanted(name, source)]
    kind = source.format
    if kind == "auto":
        kind = format_of_folder(folder.root, {name: folder.files[name].size_bytes for name in wanted})
        states = {posixpath.join(posixpath.dirname(name), "state.json") for name in wanted}
        if kind == "arrow" and not states.isdisjoint(folder.files):
            kind = "hf"
    if kind == "hf":
        chosen = _saved_dataset(folder, names, source, say)
    elif kind == "mds":
        chosen = _shards(folder, wanted)
    else:
        chosen = wanted if source.include else _of_format(wanted, kind, source)
        if kind == "source":
            chosen = _looks_like_source(folder, chosen)
    if not chosen:
        counts = Counter(extension_of(name) or "no extension" for name in names).most_common(5)
        seen = ", ".join(f"{count} x {extension}" for extension, count in counts) or "no files"
        asked = " ".join(source.include) or " ".join(EXTENSIONS[kind][:8])
        what = f"{folder.root}: no {kind} file to read ({asked}); it holds {seen}"
        raise UserError(f"{what}; set format or include")
    if say and kind != "hf" and not (source.include or source.exclude):
        _name_splits(folder, chosen, say)
    return [(folder.files[name], kind) for name in chosen]


def is_wanted(name: str, source: SourceSpec) -> bool:
    """Whether `include` and `exclude` let a file in."""
    return not _any(name, source.exclude) and (not source.include or _any(name, source.include))


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _of_format(names: list[str], kind: Format, source: SourceSpec) -> list[str]:
    chosen = [name for name in names if extension_of(name) in EXTENSIONS[kind]]
    if not chosen and source.format == "jsonl":  # many corpora call their JSON lines .json.gz
        chosen = [name for name in names if extension_of(name) == ".json"]
    return chosen


def _looks_like_source(folder: Folder, names: list[str]) -> list[str]:
    small = [name for name in names if folder.files[name].size_bytes <= _SOURCE_FILE_LIMIT_BYTES]
    heads = folder.heads([folder.files[name].path for name in small], _HEAD_BYTES)
    return [name for name, head in zip(small, heads, strict=True) if b"\0" not in head]


def _saved_dataset(folder: Folder, names: list[str], source: SourceSpec, say: Say) -> list[str]:
    """The Arrow files that the state of each saved dataset names: others beside them are left-overs of mapping."""
    chosen = []
    for place, state in _described(folder, "state.json"):
        if state.get("_indices_files"):
            raise UserError(
                f"{folder.root}/{place}state.json: the dataset was saved with an index over its rows, which is not "
                "read; save it again with dataset.flatten_indices().save_to_disk(...)"
            )
        listed = [place + entry["filename"] for entry in state.get("_data_files") or []]
        _check_there(folder, f"{place}state.json", listed)
        chosen += listed
    chosen = [name for name in chosen if name in set(names)]
    if source.include:
        return [name for name in chosen if _any(name, source.include)]
    for place, described in _described(folder, "dataset_dict.json"):
        splits = [str(split) for split in described.get("splits") or []]
        others = [split for split in splits if split != "train"]
        root = posixpath.join(folder.root, place).rstrip("/")
        if "train" in splits:
            train = f"{place}train/"
            chosen = [name for name in chosen if not name.startswith(place) or name.startswith(train)]
            if say and others:
                fix = f"`include: ['{place}{others[0]}/*']` reads another"
                say(f"{root}: a DatasetDict: only its split train is read, not {', '.join(others)}; {fix}")
        elif say and len(others) > 1:
            fix = f"`include: ['{place}{others[0]}/*']` reads one of them"
            say(f"{root}: a DatasetDict without a split train: all its splits are read ({', '.join(others)}); {fix}")
    return sorted(chosen)


def _name_splits(folder: Folder, names: list[str], say: Callable[[str], None]) -> None:
    """Files of a held-out split among those to train on, as datasets are often published."""
    splits = dict.fromkeys(match[1].lower() for name in names if (match := _SPLIT.search(name)))
    if "train" in splits and len(splits) > 1:
        what = f"{folder.root}: files of several splits are read ({', '.join(splits)})"
        say(f"{what}; `include: ['*train*']` or `exclude` leaves the others out")


def _shards(folder: Folder, wanted: list[str]) -> list[str]:
    """The shards that each index.json names, unpacked where both forms are there."""
    chosen = []
    for place, index in _described(folder, "index.json"):
        for shard in index.get("shards") or []:
            given = (shard.get("raw_data"), shard.get("zip_data"))
            forms = [place + form["basename"] for form in given if form]
            there = [name for name in forms if name in folder.files]
            _check_there(folder, f"{place}index.json", there[:1] or forms[:1])
            chosen.append(there[0])
    return sorted(name for name in set(chosen) if name in set(wanted))


def _described(folder: Folder, own: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file of that name below the folder: the folder that it describes, and what it says."""
    for name in sorted(folder.files):
        if posixpath.basename(name) != own:
            continue
        try:
            said = json.loads(folder.read(folder.files[name].path))
        except ValueError as error:
            raise UserError(f"{folder.root}/{name}: not valid JSON ({error}); restore it") from error
        if isinstance(said, dict):
            yield name[: -len(own)], said


def _check_there(folder: Folder, index: str, names: list[str]) -> None:
    missing = [name for name in names if name not in folder.files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"{folder.root}/{index} names {missing[0]}{more}, not there"
        raise UserError(f"{what}; restore or copy it again")


if TYPE_CHECKING:
    from bessemer.spec.data import Format, SourceSpec

Skip = Callable[[str, str], None] | None

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}  # and hidden ones, such as .git


def list_files(source: SourceSpec, say: Say = None, skip: Skip = None) -> list[FileEntry]:
    """Every file that the source names. A folder is walked without following links to folders. Of a saved Hugging
    Face dataset and of MDS, the files are those that their own index names; of a DatasetDict with a split `train`,
    those of that split unless `include` asks for others. `say` is told which splits are read and which are not; `skip`
    gets the path of each entry of a folder that cannot be read (a broken link, a named pipe), and what it is."""
    check_storage(source.storage)
    entries: dict[str, FileEntry] = {}
    for pattern in source.path:
        if is_url(pattern) and protocol_of(pattern) not in ("file", "local"):
            try:
                listed = list(_list_remote(pattern, source, say))
            except OSError as error:
                raise UserError(f"{shown(pattern)}: cannot be listed ({redacted(error)})") from error
        else:
            listed = list(_list_local(pattern.partition("://")[2] or pattern, source, say, skip))
        for found, kind in listed:
            entries[found.path] = FileEntry(found.path, found.size_bytes, kind, found.mtime_ns, found.version)
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
    place = RemoteLocation.of(pattern, source.storage)
    web = is_web(pattern)
    # A web address has `?` before its query.
    magic = glob.has_magic(place.path) and ("*" in place.path or not web)
    matched: dict[str, RemoteEntry | None] = place.expand() if magic else {}
    if not matched and web and urlsplit(pattern).path.endswith("/"):
        matched = {place.path: None}
    if not matched:
        try:
            matched = {place.path: place.describe()}
        except FileNotFoundError:
            raise _missing_remote(place, magic) from None
    for path, found in matched.items():
        if found is not None:
            yield found, _format(urlsplit(path).path if web else path, source)
            continue
        files = {name: inner for name, inner in place.walk(path).items() if not _skipped(name)}
        root = shown(place.prefix + path).rstrip("/")
        yield from choose(Folder(root, files, place.read_small, place.read_heads), source, say)


def _format(path: str, source: SourceSpec) -> Format:
    return format_of_file(shown(path)) if source.format == "auto" else source.format


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
        found = glob.glob(path, recursive=True)
        matches = sorted(match for match in found if os.path.exists(match) and not ("**" in path and _loops(match)))
        broken = sorted(match for match in found if not os.path.exists(match))
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
    """What is no regular file, in words: opening it may wait for ever, or never end."""
    mode = os.stat(path).st_mode
    kinds = {
        S_ISFIFO: "a named pipe",
        S_ISSOCK: "a socket",
        S_ISCHR: "a device",
        S_ISBLK: "a device",
        S_ISDIR: "a folder",
    }
    kind = next((name for test, name in kinds.items() if test(mode)), "no regular file")
    target = os.path.realpath(path)
    return f"a link to {kind} ({target})" if os.path.islink(path) else kind


def _broken_link(path: str) -> str:
    """Why a link leads nowhere."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"a symbolic link that leads back to itself (by way of {os.readlink(path)})"
        return f"a symbolic link to {os.readlink(path)}, which cannot be reached ({error.strerror})"
    return "a symbolic link"


def _loops(path: str) -> bool:
    """Whether the way to a file goes through a link to a folder that it has come through already."""
    folder = os.path.dirname(path)
    while folder != os.path.dirname(folder):
        if os.path.islink(folder):
            inside, target = os.path.realpath(os.path.dirname(folder)), os.path.realpath(folder)
            if inside == target or inside.startswith(target.rstrip(os.sep) + os.sep):
                return True
        folder = os.path.dirname(folder)
    return False


def _missing_remote(place: RemoteLocation, magic: bool) -> UserError:
    parent = place.path.rstrip("/").rpartition("/")[0]
    while glob.has_magic(parent):
        parent = parent.rpartition("/")[0]
    names = place.names_in(parent) if parent else []
    return _missing(shown(place.url), shown(place.prefix + parent), names, magic)


def _missing(path: str, parent: str, names: list[str], magic: bool) -> UserError:
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    what = "nothing matches" if magic else "no such file or folder:"
    return UserError(f"{what} {path}; {parent} holds {listed or 'nothing readable'}; correct the path")


def _skipped(name: str) -> bool:
    *folders, own = name.split("/")
    return own.startswith(".") or any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in folders)


def _refuse(error: OSError) -> None:
    what = f"{error.filename}: cannot be listed ({error.strerror})"
    raise UserError(f"{what}; allow it or leave it out") from error


def _local_folder(root: str) -> tuple[Folder, dict[str, str]]:
    """The files of a folder, and what each entry is that is neither a folder nor a regular file that can be reached."""
    files, unreadable = {}, {}
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not _skipped(f"{name}/x")]
        relative = os.path.relpath(folder, root)
        for name in names:
            path = os.path.join(folder, name)
            if _skipped(name):
                continue
            inside = name if relative == "." else f"{relative}/{name}"
            if os.path.isfile(path):
                files[inside] = _stat(path)
            else:
                unreadable[inside] = file_kind(path) if os.path.exists(path) else _broken_link(path)

    def read(path: str, size_bytes: int = -1) -> bytes:
        with open(path, "rb") as file:
            return file.read(size_bytes)

    found = Folder(root, files, read, lambda paths, size_bytes: [read(path, size_bytes) for path in paths])
    return found, dict(sorted(unreadable.items()))
