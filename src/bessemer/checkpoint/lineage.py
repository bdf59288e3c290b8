"""The origin and names of a run's checkpoints: code, data, parents; version tags; moving checkpoints aside.

checkpoints/lineage.json   one record per start of the run
checkpoints/tags.json      {tag: checkpoint}; retention never deletes a tagged checkpoint
checkpoints/abandoned/     checkpoints that `restore` moved aside
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.checkpoint.manifest import NAME, Manifest, commit, verify
from bessemer.checkpoint.store import TAGS, CheckpointStore, _key
from bessemer.errors import UserError
from bessemer.storage import write_atomic

LINEAGE = "lineage.json"
ABANDONED = "abandoned"
_VERSION = re.compile(r"^v?(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$")
_FIX = "; repair or delete it"
_GIT_S = 20  # timeout; a repository on a slow file system must not delay a run


def code_state(folder: Path) -> dict[str, str] | None:
    """The commit of the repository around a folder, and a hash of uncommitted changes; None without git."""

    def git(*arguments: str) -> bytes:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        status = git("status", "--porcelain")
        dirty = status and status + git("diff", "HEAD", "--binary")
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit, or a timeout
        return None
    return {"commit": commit, "dirty": hashlib.sha256(dirty).hexdigest() if dirty else ""}


def record_lineage(
    run_folder: Path, *, stream_fingerprint: str, spec_fingerprint: str, versions: dict[str, str],
    resumed_from: str | None = None, started_from: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Add this start to the run's lineage, once per start, by the process that writes the run; returns the record."""
    record = {
        "time": round(time.time(), 3),
        "code": {"bessemer": code_state(Path(__file__).parent), "project": code_state(Path.cwd())},
        "stream": stream_fingerprint,
        "spec": spec_fingerprint,
        "resumed_from": resumed_from,
        "started_from": started_from,  # an imported or averaged checkpoint
        "versions": versions,
    }
    path = run_folder / "checkpoints" / LINEAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps([*_read(path, []), record], indent=1))
    return record


def repair_lineage(run_folder: Path) -> str:
    """Rename a damaged lineage file, so that a new one starts. Returns what was done, or an empty string."""
    path = run_folder / "checkpoints" / LINEAGE
    try:
        _read(path, [])
    except (UserError, IsADirectoryError) as error:
        backup = path.with_name(f"{LINEAGE}.damaged")
        while backup.exists():
            backup = backup.with_name(f"{backup.name}.1")
        os.replace(path, backup)
        problem = error if isinstance(error, UserError) else f"{path}: is a folder"
        return f"{str(problem).removesuffix(_FIX)}; renamed to {backup.name}; a new record starts"
    return ""


def lineage(run_folder: Path) -> dict[str, Any]:
    """The starts, the tags, and the sources of weights-only checkpoints."""
    folder = run_folder / "checkpoints"
    made_from = {
        path.name: manifest.progress["made_from"]
        for path, manifest in CheckpointStore(folder).committed("model")
        if "made_from" in manifest.progress
    }
    return {"starts": _read(folder / LINEAGE, []), "tags": read_tags(folder), "made_from": made_from}


def _read(path: Path, missing: Any) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}){_FIX}") from None
    if not isinstance(content, type(missing)):
        raise UserError(f"{path}: should hold a {type(missing).__name__}{_FIX}")
    return content


def read_tags(folder: Path) -> dict[str, str]:
    """{tag: checkpoint} of a checkpoints folder."""
    return _read(folder / TAGS, {})


def tag(folder: Path, checkpoint: str, version: str, move: bool = False) -> None:
    """Tag a checkpoint with a version. A tag of another checkpoint moves only with `move`."""
    if not _VERSION.match(version):
        raise UserError(f"{version!r}: write a semantic version such as v1.2.0 or 1.2.0-rc.1")
    if not (folder / checkpoint / NAME).exists():
        raise UserError(f"{folder}: no checkpoint {checkpoint!r}")
    tags = read_tags(folder)
    if tags.get(version, checkpoint) != checkpoint and not move:
        raise UserError(f"{version} already tags {tags[version]}; choose another version, or pass --move")
    write_atomic(folder / TAGS, json.dumps({**tags, version: checkpoint}, indent=1, sort_keys=True))


def continue_from(folder: Path, checkpoint: str) -> tuple[Manifest, list[str]]:
    """Make a run continue from a checkpoint: moves all later ones to `abandoned/`; returns its manifest and their
    names.

    Renames within one file system: after a kill some are moved, and the same call again moves the rest.
    """
    target = folder / checkpoint
    manifest = verify(target)
    if manifest.content != "full":
        raise UserError(f"{target}: holds weights only; a run continues from a full checkpoint")
    later = _move_aside(folder, [path for path in folder.iterdir() if _key(path) > _key(target)])
    # Update the time: otherwise the next start would fetch later checkpoints from the remote storage.
    commit(target, replace(manifest, time=time.time()))
    return manifest, later


def abandon_all(folder: Path) -> list[str]:
    """Move every checkpoint, valid or not, to `abandoned/`; returns the names."""
    return _move_aside(folder, [path for path in folder.iterdir() if _key(path) > (-1, -1)])


def _move_aside(folder: Path, checkpoints: list[Path]) -> list[str]:
    """The newest first, since a start would resume from it. Returns the names, oldest first."""
    newest_first = sorted(checkpoints, key=_key, reverse=True)
    (folder / ABANDONED).mkdir(exist_ok=True)
    for path in newest_first:
        target, count = folder / ABANDONED / path.name, 1
        while target.exists():
            target, count = folder / ABANDONED / f"{path.name}.{count}", count + 1
        os.replace(path, target)
    return [path.name for path in reversed(newest_first)]
