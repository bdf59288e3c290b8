"""Checkpoints mirrored to any fsspec URL, and fetched back if the local disk is lost.

The manifest is uploaded last, so it is the commit there too. Failed requests are retried with growing, randomised
pauses.
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
# They have no real folders, and creating one may create a bucket.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}


@dataclass
class RemoteCheckpoints:
    """The checkpoints of one run under a URL. A request is tried up to `attempts` times."""

    url: str
    attempts: int = 6
    pause_s: float = 0.5
    failures: int = 0  # failed requests
    _manifests: dict[str, Manifest] = field(default_factory=dict)  # cached: a committed manifest never changes

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

    def _retry(self, name: str, request: Callable[[], Result]) -> Result:
        """Retry until there is an answer. A missing file is an answer; other library errors end as OSError."""
        failures = 0

        def should_retry(error: Exception) -> bool:
            nonlocal failures
            failures += not isinstance(error, FileNotFoundError | DamagedCheckpoint)
            return not isinstance(error, FileNotFoundError | DamagedCheckpoint | PermissionError)

        try:
            return retry(request, attempts=self.attempts, pause_s=self.pause_s, should_retry=should_retry)
        except (FileNotFoundError, DamagedCheckpoint):
            raise
        except Exception as error:  # each library has its own: botocore, aiohttp, Google
            text = " ".join(f"{type(error).__name__}: {error}".split())
            times = f"failed {failures} times, at last" if failures > 1 else "failed"
            raise OSError(f"{self.url}/{name}: {times} with {text}") from error
        finally:
            self.failures += failures

    def _put(self, local: Path, name: str) -> None:
        """Upload a file and compare the size. Its content is verified when it is fetched: reading back every upload
        would double the traffic, and object stores check each part themselves."""
        target = f"{self.root}/{name}"

        def put() -> None:
            if self._makes_folders:
                self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(local), target)
            if (arrived := self.fs.info(target)["size"]) != local.stat().st_size:
                raise OSError(f"{arrived:,} bytes arrived instead of {local.stat().st_size:,}")

        self._retry(name, put)

    def _get(self, name: str, local: Path, size_bytes: int | None = None) -> None:
        def get() -> None:
            remote_bytes = self.fs.info(f"{self.root}/{name}")["size"]
            if size_bytes not in (None, remote_bytes):
                raise DamagedCheckpoint(f"{self.url}/{name}: {remote_bytes} bytes, the manifest says {size_bytes}")
            self.fs.get_file(f"{self.root}/{name}", str(local))
            if local.stat().st_size != remote_bytes:  # an interrupted transfer is no damage
                raise OSError(f"{local.stat().st_size:,} bytes arrived instead of {remote_bytes:,}")

        try:
            self._retry(name, get)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self.url}/{name}: missing") from None

    def upload(self, folder: Path) -> int:
        """Upload a committed checkpoint; returns the bytes."""
        manifest = read_manifest(folder)
        for name in (*manifest.files, NAME):
            self._put(folder / name, f"{folder.name}/{name}")
        self._manifests[folder.name] = manifest
        return manifest.bytes

    def _listed(self) -> dict[str, Manifest | None]:
        """Every checkpoint folder by name; None for an unfinished upload."""

        def names() -> list[str]:
            self.fs.invalidate_cache()  # the listing may be stale
            with suppress(FileNotFoundError):
                return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
            return []

        listed = sorted(name for name in self._retry("", names) if name.startswith(("step-", "model-")))
        for name in listed:
            path = f"{name}/{NAME}"
            if name not in self._manifests:
                with suppress(FileNotFoundError, DamagedCheckpoint):
                    content = self._retry(path, lambda path=path: self.fs.cat_file(f"{self.root}/{path}"))  # type: ignore[misc]
                    self._manifests[name] = parse_manifest(content, f"{self.url}/{path}")
        return {name: self._manifests.get(name) for name in listed}

    def committed(self) -> dict[str, Manifest]:
        """Checkpoints with a readable manifest, by name."""
        return {name: manifest for name, manifest in self._listed().items() if manifest}

    def _confirmed(self, name: str) -> bool:
        with suppress(FileNotFoundError):  # not `exists`, which returns False for any error
            self._retry(name, lambda: self.fs.info(f"{self.root}/{name}/{CONFIRMED}"))
            return True
        return False

    def discard(self, name: str) -> None:
        """Delete a remote checkpoint, the manifest first."""
        self._manifests.pop(name, None)
        with suppress(FileNotFoundError):
            self._retry(name, lambda: self.fs.rm_file(f"{self.root}/{name}/{NAME}"))
        with suppress(FileNotFoundError):
            self._retry(name, lambda: self.fs.rm(f"{self.root}/{name}", recursive=True))

    def abandon(self, after_step: int, tagged: set[str]) -> None:
        """Delete checkpoints of later steps than a rollback's target."""
        for name, manifest in self.committed().items():
            if manifest.step > after_step and name not in tagged:
                self.discard(name)

    def thin(self, newest: str, rules: CheckpointSpec, tagged: set[str], confirming: bool) -> list[str]:
        """Delete remote checkpoints that the rules do not keep, and unfinished uploads; returns the names."""
        listed = self._listed()
        full = {name: manifest for name, manifest in listed.items() if manifest and manifest.content == "full"}
        entries = [entry_of(name, manifest, self._confirmed(name)) for name, manifest in full.items()]
        rules = rules.model_copy(update={"keep_last": rules.remote_keep_last or rules.keep_last})
        retained = keep(entries, rules, newest, time.time(), tagged, confirming)
        removed = [name for name, manifest in listed.items() if name not in retained and (not manifest or name in full)]
        for name in removed:
            self.discard(name)
        return removed

    def mirror(self, store: CheckpointStore, folder: Path, rules: CheckpointSpec, confirming: bool) -> dict[str, Any]:
        """Everything after a commit: upload, copy new confirmations and tags, apply retention. Returns the event's
        fields."""
        before = self.failures
        uploaded = self.upload(folder)
        uploaded_names = self.committed()
        for path, _ in store.committed("model"):
            if path.name not in uploaded_names:
                uploaded += self.upload(path)
        for path in store.confirmed():
            if path.name in uploaded_names and not self._confirmed(path.name):
                self._put(path / CONFIRMED, f"{path.name}/{CONFIRMED}")
        if (store.folder / TAGS).exists():
            self._put(store.folder / TAGS, TAGS)
        removed = self.thin(folder.name, rules, store.tagged(), confirming)
        event = {"bytes": uploaded, "retried": self.failures - before, "removed": removed}
        return {key: value for key, value in event.items() if value}

    def fetch(self, name: str, manifest: Manifest, store: CheckpointStore) -> Path:
        """Download a checkpoint into the store and verify it; DamagedCheckpoint if it differs from what was saved.

        It gets its name when it is complete and on disk, and replaces a damaged local one.
        """
        temporary = store.folder / f"{DOWNLOAD}{name}"
        temporary.mkdir(exist_ok=True)
        files = [*manifest.files, NAME] + ([CONFIRMED] if self._confirmed(name) else [])
        for file in files:
            self._get(f"{name}/{file}", temporary / file, manifest.files.get(file, {}).get("bytes"))
            sync_path(temporary / file)
        verify(temporary)
        if (store.folder / name).exists():
            discard(store.folder / name)
        commit_folder(temporary, store.folder / name)
        if not (store.folder / TAGS).exists():
            with suppress(DamagedCheckpoint):  # no tags
                self._get(TAGS, store.folder / TAGS)
        return store.folder / name


def recover(store: CheckpointStore, remote: RemoteCheckpoints, event: Callable[..., None]) -> Path | None:
    """Fetch the newest remote checkpoint if no local one that verifies is as new.

    Called at every start: another machine may have continued the run. Checkpoints are compared by save time, since a
    rollback makes steps go back. Raises UserError if there is no local checkpoint and the remote storage cannot be
    read: starting over without being told to would lose the run.
    """
    local_s = _newest_valid_time(store)
    try:
        newer = {n: m for n, m in remote.committed().items() if m.content == "full" and m.time > local_s}
        for name in sorted(newer, key=lambda name: newer[name].time, reverse=True):
            try:
                folder = remote.fetch(name, newer[name], store)
            except DamagedCheckpoint as error:
                event("checkpoint_passed_over", checkpoint=name, reason=str(error))
                continue
            event("fetched", checkpoint=name, step=newer[name].step, reason=f"{remote.url} is newer than the local one")
            return folder
    except OSError as error:
        if not local_s:
            raise UserError(
                f"{error}: there is no local checkpoint and the remote storage cannot be read; "
                "to start over anyway, remove checkpoint.remote from the spec"
            ) from error
        event("remote_unreachable", reason=str(error))
    return None


def _newest_valid_time(store: CheckpointStore) -> float:
    """The save time of the newest local checkpoint that verifies; 0 if there is none."""
    for path in store.newest_first():
        with suppress(DamagedCheckpoint):
            return verify(path).time
    return 0.0
