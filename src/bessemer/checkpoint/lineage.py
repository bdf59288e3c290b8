"""Where a run's checkpoints come from and what they are called: code, data, parents; semantic versions; setting aside.

checkpoints/lineage.json   one record for every start of the run
checkpoints/tags.json      {tag: checkpoint}; a tagged checkpoint is never deleted by retention
checkpoints/abandoned/     checkpoints that `restore` took out of the run's way
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
_GIT_S = 20  # a repository on a slow file system does not hold a run up for longer


def code_state(folder: Path) -> dict[str, str] | None:
    """The commit of the repository around a folder, and a hash of what differs from it; None without git."""

    def git(*arguments: str) -> bytes:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        status = git("status", "--porcelain")
        dirty = status and status + git("diff", "HEAD", "--binary")
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit yet, or too slow
        return None
    return {"commit": commit, "dirty": hashlib.sha256(dirty).hexdigest() if dirty else ""}


def record_lineage(
    run_folder: Path,
    *,
    stream_fingerprint: str,
    spec_fingerprint: str,
    versions: dict[str, str],
    resumed_from: str | None = None,
    started_from: str | None = None,
) -> dict[str, Any]:
    """Add this start to the run's lineage: once a start, by the one process that writes the run. The record."""
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
    """Rename a damaged record of the starts, so that a new one begins. What was done, or an empty string."""
    path = run_folder / "checkpoints" / LINEAGE
    try:
        _read(path, [])
    except (UserError, IsADirectoryError) as error:
        aside = path.with_name(f"{LINEAGE}.damaged")
        while aside.exists():
            aside = aside.with_name(f"{aside.name}.1")
        os.replace(path, aside)
        fault = error if isinstance(error, UserError) else f"{path}: is a folder"
        return f"{str(fault).removesuffix('; mend or delete it')}; renamed to {aside.name}, and a new record begins"
    return ""


def lineage(run_folder: Path) -> dict[str, Any]:
    """All that is known: the starts, the tags, and what checkpoints of weights alone were made from."""
    folder = run_folder / "checkpoints"
    made = {path.name: manifest.progress["made_from"] for path, manifest in CheckpointStore(folder).committed("model")
            if "made_from" in manifest.progress}  # fmt: skip
    return {"starts": _read(folder / LINEAGE, []), "tags": read_tags(folder), "made_from": made}


def _read(path: Path, missing: Any) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); mend or delete it") from None
    if not isinstance(found, type(missing)):
        raise UserError(f"{path}: should hold a {type(missing).__name__}; mend or delete it")
    return found


def read_tags(folder: Path) -> dict[str, str]:
    """{tag: checkpoint} of a checkpoints folder."""
    return _read(folder / TAGS, {})


def tag(folder: Path, checkpoint: str, version: str, move: bool = False) -> None:
    """Call a checkpoint by a version. A tag that names another one moves only if asked to."""
    if not _VERSION.match(version):
        raise UserError(f"{version!r}: write a semantic version such as v1.2.0 or 1.2.0-rc.1")
    if not (folder / checkpoint / NAME).exists():
        raise UserError(f"{folder}: no checkpoint {checkpoint!r}")
    tags = read_tags(folder)
    if tags.get(version, checkpoint) != checkpoint and not move:
        raise UserError(f"{version} is {tags[version]} already; choose another version, or pass --move")
    write_atomic(folder / TAGS, json.dumps({**tags, version: checkpoint}, indent=1, sort_keys=True))


def go_back_to(folder: Path, checkpoint: str) -> tuple[Manifest, list[str]]:
    """Make a checkpoint the one that a run goes on from: all that was saved after it moves to `abandoned/`; the names.

    Renames within one file system: a kill on the way leaves some moved, and the same call again moves the rest.
    """
    target = folder / checkpoint
    manifest = verify(target)
    if manifest.content != "full":
        raise UserError(f"{target}: holds the weights alone; a run goes on from a full checkpoint")
    found = [path for path in folder.iterdir() if _key(path) > _key(target)]
    later = _move_aside(folder, found)
    # As new as can be: at a start, whatever the remote tier has that was saved later would be fetched again.
    commit(target, replace(manifest, time=time.time()))
    return manifest, later


def abandon_all(folder: Path) -> list[str]:
    """Move every checkpoint, sound or not, to `abandoned/`; the names."""
    return _move_aside(folder, [path for path in folder.iterdir() if _key(path) > (-1, -1)])


def _move_aside(folder: Path, checkpoints: list[Path]) -> list[str]:
    """The newest first: it is what a start would resume from. The names, the oldest first."""
    ordered = sorted(checkpoints, key=_key, reverse=True)
    (folder / ABANDONED).mkdir(exist_ok=True)
    for path in ordered:
        place, count = folder / ABANDONED / path.name, 1
        while place.exists():
            place, count = folder / ABANDONED / f"{path.name}.{count}", count + 1
        os.replace(path, place)
    return [path.name for path in reversed(ordered)]
