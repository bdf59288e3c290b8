"""The manifest is the commit: a checkpoint folder without one, or whose files do not match it, is not a
checkpoint.

It holds a hash of every file and one of itself, so a changed step or data position is detected like a changed
tensor.
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
DISCARDED = f"{NAME}.discarded"  # the manifest's name while its checkpoint is being deleted
CONFIRMED = "confirmed"  # a marker file that may be added after the commit; not listed in the manifest
_SELF = "manifest_xxh3_128"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `step` steps are done; the next one has number `step`."""

    step: int
    attempt: int
    stream_fingerprint: str
    stream: dict[str, Any]
    spec_fingerprint: str
    segments: list[dict[str, int]]
    batch_rows: list[list[int]]  # [first step, sequences per batch]
    progress: dict[str, Any]
    threads: int
    device: str
    versions: dict[str, str]
    time: float
    validation_loss: float | None = None
    validation_score: float | None = None  # what the best checkpoint is chosen by, lower is better
    stream_state: str | None = None  # of data that cannot be re-read from an arbitrary step
    guard: dict[str, Any] = field(default_factory=dict)  # active adjustments, detector windows
    content: str = "full"  # or "model": weights only
    layout: dict[str, int] = field(default_factory=dict)  # parallel degrees above 1
    base: dict[str, Any] = field(default_factory=dict)  # a `FrozenBase`: where the tensors are that are left out
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be loaded; the message names the file."""


def hash_file(path: Path, from_disk: bool = False) -> str:
    """xxh3-128 of the content, read in pieces; `from_disk` first drops the kernel's cached copy."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):  # missing on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(4 << 20):
            digest.update(piece)
    return str(digest.hexdigest())


def _content_hash(data: dict[str, Any]) -> str:
    """Hash of the values, not of the text: what JSON reads back hashes the same, in the written order."""
    return str(xxhash.xxh3_128(json.dumps(data).encode()).hexdigest())


def to_json(manifest: Manifest) -> dict[str, Any]:
    """As written to disk: without `base` if the checkpoint holds every tensor, as in earlier versions, and without a
    score that is the loss."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(manifest)))
    if not data["base"]:
        del data["base"]
    if data["validation_score"] in (None, data["validation_loss"]):
        del data["validation_score"]
    return data


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically and durably."""
    data = to_json(manifest)
    sync_path(folder)  # the names of the shards before the manifest that lists them
    write_atomic(folder / NAME, json.dumps({**data, _SELF: _content_hash(data)}, indent=1))
    sync_path(folder.parent)


def discard(folder: Path) -> None:
    """Delete a checkpoint. The manifest is renamed first and deleted last, so that `sweep` recognises what a kill
    leaves."""
    with suppress(FileNotFoundError):
        os.replace(folder / NAME, folder / DISCARDED)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != DISCARDED:
            path.unlink()
    shutil.rmtree(folder)


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedCheckpoint if it is missing, unreadable, altered or of another format."""
    try:
        return parse_manifest((folder / NAME).read_bytes(), str(folder / NAME))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no manifest, the save did not finish") from None


def parse_manifest(content: bytes, where: str) -> Manifest:
    """A manifest from the bytes of its file; `where` is for the error message."""
    try:
        data = json.loads(content.decode())
        if data.get("format") != FORMAT:
            raise DamagedCheckpoint(f"{where}: format {data.get('format')}, this version reads {FORMAT}")
        if data.pop(_SELF, None) != _content_hash(data):
            raise DamagedCheckpoint(f"{where}: its content differs from what was saved (hash mismatch)")
        return Manifest(**data)
    except (ValueError, TypeError, AttributeError) as error:  # ValueError: not JSON or not UTF-8
        raise DamagedCheckpoint(f"{where}: unreadable: {error}") from None


def verify(folder: Path) -> Manifest:
    """Check every file against the manifest: present, right size, right hash, no extra files."""
    manifest = read_manifest(folder)
    present = {path.name for path in folder.iterdir() if not path.match(f"{NAME}.*.tmp")} - {NAME, CONFIRMED}
    for name in present - set(manifest.files):
        raise DamagedCheckpoint(f"{folder / name}: not in the manifest")
    for name in manifest.files:
        verify_file(folder / name, manifest)
    return manifest


def verify_file(path: Path, manifest: Manifest) -> None:
    """Check one file of a checkpoint: present, right size, right hash."""
    expected = manifest.files[path.name]
    if not path.exists():
        raise DamagedCheckpoint(f"{path}: missing")
    if path.stat().st_size != expected["bytes"]:
        raise DamagedCheckpoint(f"{path}: {path.stat().st_size} bytes, the manifest says {expected['bytes']}")
    if hash_file(path) != expected["xxh3_128"]:
        raise DamagedCheckpoint(f"{path}: its content differs from what was saved (hash mismatch)")
