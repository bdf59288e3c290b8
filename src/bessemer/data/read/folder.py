"""Which files of a folder a source takes, and as what: by patterns, extensions, and the index of a saved dataset."""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bessemer.data.read.names import EXTENSIONS, extension_of, format_of_folder, matches
from bessemer.data.read.remote import Found
from bessemer.errors import UserError

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
    files: dict[str, Found]
    read: Callable[[str], bytes]  # a small file
    heads: Callable[[list[str], int], list[bytes]]  # the first bytes of many


def choose(folder: Folder, source: SourceSpec, say: Say = None) -> list[tuple[Found, Format]]:
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
