"""The manifest is the commit: a checkpoint folder without one, or whose files do not match it, is not a checkpoint.

It holds a hash of every file and one of itself, so a changed step or data position is found like a changed tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer.storage import sync_path, write_atomic

FORMAT = 1
NAME = "manifest.json"
DISCARDED = f"{NAME}.discarded"  # what the manifest is called while its checkpoint is being deleted
CONFIRMED = "confirmed"  # a marker that may come later than the manifest, and is no part of what it vouches for
_SELF = "manifest_xxh3_128"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. It has done `step` steps; the next one is number `step`."""

    step: int
    attempt: int
    stream_fingerprint: str
    stream: dict[str, Any]
    spec_fingerprint: str
    segments: list[dict[str, int]]
    batch_rows: list[list[int]]  # [from step, sequences in a batch]
    progress: dict[str, Any]
    threads: int
    device: str
    versions: dict[str, str]
    time: float
    validation_loss: float | None = None
    stream_state: str | None = None  # of data that cannot be read again from any step
    guard: dict[str, Any] = field(default_factory=dict)  # the guard's own: adjustments in force, detectors' windows
    content: str = "full"  # or "model": the weights alone
    layout: dict[str, int] = field(default_factory=dict)  # degrees above 1, of several processes
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(int(about["bytes"]) for about in self.files.values())


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be loaded; the message names the file."""


def hash_file(path: Path, from_disk: bool = False) -> str:
    """xxh3-128 of the content, read in pieces; `from_disk` first drops what the kernel holds of it in memory."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):  # not on macOS: there it is read from wherever it is
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(4 << 20):
            digest.update(piece)
    return str(digest.hexdigest())


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file in a checkpoint folder."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(NAME) and path.name != CONFIRMED)
    return {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": hash_file(folder / name)} for name in names}


def _hash_of_itself(data: dict[str, Any]) -> str:
    """Of the values, not of the text: what JSON reads back hashes the same, in the order it was written."""
    return str(xxhash.xxh3_128(json.dumps(data).encode()).hexdigest())


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the manifest so that it appears whole or not at all, and survives a power cut."""
    data = json.loads(json.dumps(asdict(manifest)))
    sync_path(folder)  # the names of the shards before the manifest that lists them
    write_atomic(folder / NAME, json.dumps({**data, _SELF: _hash_of_itself(data)}, indent=1))
    sync_path(folder.parent)


def discard(folder: Path) -> None:
    """Delete a checkpoint. A kill on the way leaves a folder that `sweep` knows for a leftover: the manifest is renamed
    first and deleted last."""
    with suppress(FileNotFoundError):
        os.replace(folder / NAME, folder / DISCARDED)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != DISCARDED:
            path.unlink()
    shutil.rmtree(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest as written. Raises Damaged if it is missing, unreadable, altered or of another format."""
    try:
        return parse_manifest((folder / NAME).read_bytes(), str(folder / NAME))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no manifest, the save did not finish") from None


def parse_manifest(content: bytes, where: str) -> Manifest:
    """A manifest from the bytes of its file; `where` is for the message of Damaged."""
    try:
        data = json.loads(content.decode())
        if data.get("format") != FORMAT:
            raise DamagedCheckpoint(f"{where}: format {data.get('format')}, this version reads {FORMAT}")
        if data.pop(_SELF, None) != _hash_of_itself(data):
            raise DamagedCheckpoint(f"{where}: its content differs from what was saved (hash mismatch)")
        return Manifest(**data)
    except (ValueError, TypeError, AttributeError) as error:  # ValueError: neither JSON nor UTF-8
        raise DamagedCheckpoint(f"{where}: unreadable: {error}") from None


def verify(folder: Path) -> Manifest:
    """Check every file against the manifest: all there, right size, right hash, nothing added."""
    manifest = read_manifest(folder)
    present = {path.name for path in folder.iterdir() if not path.match(f"{NAME}.*.tmp")} - {NAME, CONFIRMED}
    for name in present - set(manifest.files):
        raise DamagedCheckpoint(f"{folder / name}: not in the manifest")
    for name in manifest.files:
        verify_file(folder / name, manifest)
    return manifest


def verify_file(path: Path, manifest: Manifest) -> None:
    """Check one file of a checkpoint: there, right size, right hash."""
    expected = manifest.files[path.name]
    if not path.exists():
        raise DamagedCheckpoint(f"{path}: missing")
    if path.stat().st_size != expected["bytes"]:
        raise DamagedCheckpoint(f"{path}: {path.stat().st_size} bytes, the manifest says {expected['bytes']}")
    if hash_file(path) != expected["xxh3_128"]:
        raise DamagedCheckpoint(f"{path}: its content differs from what was saved (hash mismatch)")
