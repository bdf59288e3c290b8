"""Which files a source names: paths, globs, folders and URLs, sorted, each once. What a path or glob names itself is
always taken; what a walk of a folder finds has to match `include`, or else the extensions of the format."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Callable, Iterator
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bessemer.data.read.entry import FileEntry
from bessemer.data.read.folder import Folder, Say, choose, is_wanted
from bessemer.data.read.names import format_of_file
from bessemer.data.read.remote import Found, Place, is_url, is_web, protocol_of
from bessemer.data.read.secrets import check_storage, redacted, shown
from bessemer.errors import UserError

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


def _list_local(pattern: str, source: SourceSpec, say: Say, skip: Skip) -> Iterator[tuple[Found, Format]]:
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


def _list_remote(pattern: str, source: SourceSpec, say: Say) -> Iterator[tuple[Found, Format]]:
    place = Place.of(pattern, source.storage)
    web = is_web(pattern)
    # A web address has `?` before its query.
    magic = glob.has_magic(place.path) and ("*" in place.path or not web)
    matched: dict[str, Found | None] = place.expand() if magic else {}
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


def _stat(path: str) -> Found:
    stat = os.stat(path)
    if not S_ISREG(stat.st_mode):
        raise UserError(f"{path}: {file_kind(path)}, which cannot be read twice; write its content to a file first")
    return Found(path, stat.st_size, stat.st_mtime_ns)


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


def _missing_remote(place: Place, magic: bool) -> UserError:
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
