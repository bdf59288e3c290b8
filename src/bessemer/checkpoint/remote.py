"""The durable tier: checkpoints copied to any fsspec URL, and fetched back when the local disk is lost.

The manifest goes up last, so it is the commit there too. Every request is made again when the storage fails, after
pauses that grow and differ from node to node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bessemer.checkpoint.manifest import (
    CONFIRMED,
    NAME,
    DamagedCheckpoint,
    Manifest,
    discard,
    parse_manifest,
    read_manifest,
    verify,
)
from bessemer.checkpoint.store import DOWNLOAD, TAGS, CheckpointStore, entry_of, keep
from bessemer.errors import UserError
from bessemer.spec.schema import CheckpointSpec
from bessemer.storage import commit_folder, retry, sync_path

Result = TypeVar("Result")
# Folders are only a way of speaking there, and asking for one may make a bucket.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}


@dataclass
class RemoteCheckpoints:
    """The checkpoints of one run under a URL. A request that fails is made `attempts` times in all."""

    url: str
    attempts: int = 6
    pause_s: float = 0.5
    failures: int = 0  # requests that had to be made again
    _manifests: dict[str, Manifest] = field(default_factory=dict)  # read once: a committed one never changes

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        protocol = self.url.partition("://")[0]
        self._makes_folders = protocol not in _OBJECT_STORES
        try:
            from fsspec.core import url_to_fs

            self.fs, self.root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            fix = "pip install 'bessemer[s3]'" if protocol in ("s3", "s3a") else "install its fsspec package"
            raise UserError(f"checkpoint.remote: {self.url}: {error}; {fix}, or correct the address") from error

    def _insist(self, name: str, request: Callable[[], Result]) -> Result:
        """Ask until it is answered. A missing file is an answer; whatever else libraries raise ends as OSError."""
        failures = 0

        def should_retry(error: Exception) -> bool:
            nonlocal failures
            failures += not isinstance(error, FileNotFoundError | DamagedCheckpoint)
            return not isinstance(error, FileNotFoundError | DamagedCheckpoint | PermissionError)

        try:
            return retry(request, attempts=self.attempts, pause_s=self.pause_s, should_retry=should_retry)
        except (FileNotFoundError, DamagedCheckpoint):
            raise
        except Exception as error:  # every library has its own: botocore's, aiohttp's, Google's
            text = " ".join(f"{type(error).__name__}: {error}".split())
            times = f"failed {failures} times, at last" if failures > 1 else "failed"
            raise OSError(f"{self.url}/{name}: {times} with {text}") from error
        finally:
            self.failures += failures

    def _put(self, local: Path, name: str) -> None:
        """Copy a file there and compare the size. Its content is compared when it is fetched, before it is used: to
        read back all that is uploaded would double the traffic, and object stores check each part's sum themselves."""
        there = f"{self.root}/{name}"

        def put() -> None:
            if self._makes_folders:
                self.fs.makedirs(there.rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(local), there)
            if (arrived := self.fs.info(there)["size"]) != local.stat().st_size:
                raise OSError(f"{arrived:,} bytes arrived instead of {local.stat().st_size:,}")

        self._insist(name, put)

    def _get(self, name: str, local: Path, size_bytes: int | None = None) -> None:
        def get() -> None:
            there = self.fs.info(f"{self.root}/{name}")["size"]
            if size_bytes not in (None, there):
                raise DamagedCheckpoint(f"{self.url}/{name}: {there} bytes, the manifest says {size_bytes}")
            self.fs.get_file(f"{self.root}/{name}", str(local))
            if local.stat().st_size != there:  # cut off on the way: that is no damage
                raise OSError(f"{local.stat().st_size:,} bytes came instead of {there:,}")

        try:
            self._insist(name, get)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self.url}/{name}: missing") from None

    def upload(self, folder: Path) -> int:
        """Copy a committed checkpoint; the bytes."""
        manifest = read_manifest(folder)
        for name in (*manifest.files, NAME):
            self._put(folder / name, f"{folder.name}/{name}")
        self._manifests[folder.name] = manifest
        return manifest.bytes

    def _listed(self) -> dict[str, Manifest | None]:
        """Every folder of a checkpoint, by name; None for one whose upload never finished."""

        def names() -> list[str]:
            self.fs.invalidate_cache()  # of the listing of minutes ago
            with suppress(FileNotFoundError):
                return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
            return []

        listed = sorted(name for name in self._insist("", names) if name.startswith(("step-", "model-")))
        for name in listed:
            path = f"{name}/{NAME}"
            if name not in self._manifests:
                with suppress(FileNotFoundError, DamagedCheckpoint):
                    content = self._insist(path, lambda path=path: self.fs.cat_file(f"{self.root}/{path}"))  # type: ignore[misc]
                    self._manifests[name] = parse_manifest(content, f"{self.url}/{path}")
        return {name: self._manifests.get(name) for name in listed}

    def committed(self) -> dict[str, Manifest]:
        """What is there with a readable manifest, by name."""
        return {name: found for name, found in self._listed().items() if found}

    def _confirmed(self, name: str) -> bool:
        with suppress(FileNotFoundError):  # not `exists`, which says no to whatever goes wrong
            self._insist(name, lambda: self.fs.info(f"{self.root}/{name}/{CONFIRMED}"))
            return True
        return False

    def discard(self, name: str) -> None:
        """Delete a checkpoint there, the manifest first."""
        self._manifests.pop(name, None)
        with suppress(FileNotFoundError):
            self._insist(name, lambda: self.fs.rm_file(f"{self.root}/{name}/{NAME}"))
        with suppress(FileNotFoundError):
            self._insist(name, lambda: self.fs.rm(f"{self.root}/{name}", recursive=True))

    def abandon(self, after_step: int, tagged: set[str]) -> None:
        """Delete what was saved later than the step that a rollback went to."""
        for name, manifest in self.committed().items():
            if manifest.step > after_step and name not in tagged:
                self.discard(name)

    def thin(self, newest: str, rules: CheckpointSpec, tagged: set[str], confirming: bool) -> list[str]:
        """Delete what the rules do not keep there, and uploads that never finished; the names."""
        listed = self._listed()
        full = {name: found for name, found in listed.items() if found and found.content == "full"}
        entries = [entry_of(name, found, self._confirmed(name)) for name, found in full.items()]
        rules = rules.model_copy(update={"keep_last": rules.remote_keep_last or rules.keep_last})
        kept = keep(entries, rules, newest, time.time(), tagged, confirming)
        gone = [name for name, found in listed.items() if name not in kept and (not found or name in full)]
        for name in gone:
            self.discard(name)
        return gone

    def mirror(self, shelf: CheckpointStore, folder: Path, rules: CheckpointSpec, confirming: bool) -> dict[str, Any]:
        """All that follows a commit: upload, pass on what was confirmed meanwhile, thin out. What the event tells."""
        before = self.failures
        uploaded = self.upload(folder)
        there = self.committed()
        for path, _ in shelf.committed("model"):
            if path.name not in there:
                uploaded += self.upload(path)
        for path in shelf.confirmed():
            if path.name in there and not self._confirmed(path.name):
                self._put(path / CONFIRMED, f"{path.name}/{CONFIRMED}")
        if (shelf.folder / TAGS).exists():
            self._put(shelf.folder / TAGS, TAGS)
        removed = self.thin(folder.name, rules, shelf.tagged(), confirming)
        again = self.failures - before  # requests that failed and were made again
        told = {"bytes": uploaded, "retried": again, "removed": removed}
        return {key: value for key, value in told.items() if value}

    def fetch(self, name: str, manifest: Manifest, shelf: CheckpointStore) -> Path:
        """Bring a checkpoint to the shelf and verify it; Damaged if it is not what was saved.

        It gets its name when it is whole and on the disk, and takes the place of a local one that is damaged.
        """
        temporary = shelf.folder / f"{DOWNLOAD}{name}"
        temporary.mkdir(exist_ok=True)
        files = [*manifest.files, NAME] + ([CONFIRMED] if self._confirmed(name) else [])
        for file in files:
            self._get(f"{name}/{file}", temporary / file, manifest.files.get(file, {}).get("bytes"))
            sync_path(temporary / file)
        verify(temporary)
        if (shelf.folder / name).exists():
            discard(shelf.folder / name)
        commit_folder(temporary, shelf.folder / name)
        if not (shelf.folder / TAGS).exists():
            with suppress(DamagedCheckpoint):  # there are none
                self._get(TAGS, shelf.folder / TAGS)
        return shelf.folder / name


def recover(shelf: CheckpointStore, remote: RemoteCheckpoints, event: Callable[..., None]) -> Path | None:
    """Fetch the newest checkpoint of the remote tier where the local one has nothing as new that verifies.

    It is called at every start: another machine may have gone on with the run since this one last saw it. Which is
    newer is told by the time of the save, since a rollback makes steps go back. Raises UserError where nothing is left
    here and the remote cannot be asked: to start over unasked would be to lose the run.
    """
    local_s = _time_of_sound(shelf)
    try:
        there = {n: m for n, m in remote.committed().items() if m.content == "full" and m.time > local_s}
        for name in sorted(there, key=lambda name: there[name].time, reverse=True):
            try:
                folder = remote.fetch(name, there[name], shelf)
            except DamagedCheckpoint as error:
                event("checkpoint_passed_over", checkpoint=name, reason=str(error))
                continue
            event("fetched", checkpoint=name, step=there[name].step, reason=f"{remote.url} is newer than what is here")
            return folder
    except OSError as error:
        if not local_s:
            raise UserError(
                f"{error}: no checkpoint is here, and whether there is one cannot be told; "
                "to start over all the same, take checkpoint.remote out of the spec"
            ) from error
        event("remote_unreachable", reason=str(error))
    return None


def _time_of_sound(shelf: CheckpointStore) -> float:
    """When the newest local checkpoint that verifies was saved; 0 if there is none."""
    for path in shelf.newest_first():
        with suppress(DamagedCheckpoint):
            return verify(path).time
    return 0.0
