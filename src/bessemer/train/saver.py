"""Saves checkpoints of a running job: the manifest, asynchronous writes and uploads, and what happens when the disk or
the remote storage refuses. Only the loop's thread writes events, in `poll` and `wait`.
"""

from __future__ import annotations

import copy
import importlib
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from bessemer.checkpoint.background import Staging, State, in_background, state_bytes
from bessemer.checkpoint.manifest import DamagedCheckpoint, Manifest
from bessemer.checkpoint.remote import RemoteCheckpoints
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.plan.cost_model.goodput import count_interruptions, mean_time_to_interruption, save_interval
from bessemer.run.snapshot import NAME as RUN_COPY
from bessemer.train.job import Job
from bessemer.train.memory.snapshots import CONFIRMED_STEPS, processes_here

PACKAGES = ("bessemer", "torch", "numpy", "tokenizers", "pydantic", "pyarrow")
# A CPU run saves in the background once a save took this long; below it, a copy of the state is not worth its memory.
WORTH_STAGING_S = 1.0


@cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@dataclass
class PendingSave:
    """A save that is running or finished."""

    step: int
    folder: Path
    began_s: float
    stall_s: float = 0.0  # how long the loop waited
    seconds: float = 0.0  # until it was committed
    details: dict[str, Any] = field(default_factory=dict)  # filled by the writing thread


class CheckpointSaver:
    """Writes checkpoints of one job, mirrors them to remote storage and applies retention to both."""

    def __init__(self, store: CheckpointStore, spec_fingerprint: str, remote: RemoteCheckpoints | None = None) -> None:
        self.store, self.spec_fingerprint, self.remote = store, spec_fingerprint, remote
        self._staging = Staging()
        self._saving: tuple[PendingSave, Future[None]] | None = None
        self._uploading: tuple[Path, Future[dict[str, Any]]] | None = None
        self._next_upload: Path | None = None
        self._last: PendingSave | None = None  # the last successful one
        self._interruptions: int | None = None
        self._unconfirmed: list[tuple[int, Path]] | None = None  # None: not read from disk yet

    def manifest(self, job: Job, step: int, validation_loss: float | None) -> Manifest:
        return Manifest(
            step=step, attempt=0, stream_fingerprint=job.data.stream.fingerprint, stream=job.data.stream.identity,
            spec_fingerprint=self.spec_fingerprint,
            segments=[segment.to_json() for segment in job.data.stream.steps.segments],
            batch_rows=[[phase.from_step, phase.rows] for phase in job.data.stream.steps.batch_phases],
            progress=job.recorder.progress.to_json(), threads=torch.get_num_threads(), device=job.engine.device.type,
            versions=package_versions(), time=time.time(), validation_loss=validation_loss,
            validation_score=None if validation_loss is None else job.recorder.progress.last_score,
            stream_state=job.data.stream.state(step) if isinstance(job.data.stream, IterableStream) else None,
            guard=copy.deepcopy(job.guard_state()),  # written later, while the guard changes
            base=job.engine.base.to_json() if job.engine.base else {},
            layout={key: degree for key, degree in asdict(job.world.layout).items() if degree > 1},
        )  # fmt: skip

    def save(self, job: Job, step: int, validation_loss: float | None) -> str | None:
        """Save after `step` steps; the checkpoint's name. An asynchronous save is complete once `poll` reports it.

        None if the disk refused, which is an event: the older checkpoints are still there.
        """
        importlib.import_module("torch.distributed.checkpoint")  # takes over a second: not part of the first save

        began_s = time.perf_counter()
        self.wait(job)
        save = PendingSave(step, self.store.reserve(step), began_s)
        state, manifest = job.state(), self.manifest(job, step, validation_loss)
        staged = self._stage(job, state) if self._is_asynchronous(job, state) else None
        if not all(job.world.gather(staged is not None)):  # if one rank cannot stage, all write synchronously
            staged = None
        work = self._work(job, save, staged or state, manifest)
        if staged is None:
            done: Future[None] = Future()
            try:
                done.set_result(work())
            except OSError as error:
                done.set_exception(error)
        else:
            done = in_background(work, f"save-{step}")
        save.stall_s = time.perf_counter() - began_s
        self._saving = save, done
        return save.folder.name if staged is not None or self.wait(job) else None

    def _is_asynchronous(self, job: Job, state: State) -> bool:
        """Decided by this rank's own time and memory; all ranks have to agree."""
        setting = job.spec.checkpoint.asynchronous
        if setting != "auto":
            return setting
        if self._staging.bytes:
            return True
        # The copy must leave memory for data and the file cache: 70B parameters on 64 GPUs are 13 GB a rank.
        fits = psutil.virtual_memory().available > 2 * state_bytes(state) * processes_here(job.world)
        slow = self._last is not None and self._last.stall_s > WORTH_STAGING_S
        return fits and (job.engine.device.type == "cuda" or slow)

    def _stage(self, job: Job, state: State) -> State | None:
        try:
            return self._staging.copy(state)
        except RuntimeError as error:  # out of host memory: the save must still happen
            job.recorder.event("staging_failed", reason=f"{str(error).splitlines()[0]}: the save is synchronous")
            self._staging = Staging()
            return None

    def _work(self, job: Job, save: PendingSave, state: State, manifest: Manifest) -> Callable[[], None]:
        """The function that writes a state, in this thread or another. It reads nothing that the loop changes."""
        rules, confirming, run = job.spec.checkpoint, job.spec.guard.enabled, job.recorder.run
        snapshot = run.snapshot()
        main, single = job.world.main, job.world.size == 1
        uploads = [self._uploading[0]] if self._uploading else []
        busy = {path.name for path in [*uploads, self._next_upload] if path}

        def run_copy() -> dict[str, bytes]:
            run.sync()  # metrics up to the checkpoint
            return {RUN_COPY: snapshot.pack()}

        def work() -> None:
            written = self.store.write(save.folder, state, manifest, run_copy)
            save.seconds = time.perf_counter() - save.began_s
            save.details = {"bytes": written.bytes}
            if not main:
                return
            try:
                if rules.archive_model_only and rules.keep_every and single:
                    self.store.write_model(state, manifest, rules.keep_every)
            except OSError as error:
                save.details["archive_failed"] = str(error)
            try:
                if removed := self.store.thin(save.folder, rules, busy, confirming):
                    save.details["removed"] = removed
            except OSError as error:  # the save succeeded; retention runs again after the next
                save.details["not_removed"] = str(error)

        return work

    def poll(self, job: Job) -> None:
        """Report saves and uploads that finished since the last call. Cheap: call it at every step.

        Ranks may see the end of a save one step apart. They need not act together: a save succeeds or fails for all of
        them, and only rank 0 confirms checkpoints.
        """
        if self._saving and self._saving[1].done():
            self.wait(job)
        if self._uploading and self._uploading[1].done():
            self._report_upload(job)

    def wait(self, job: Job, uploads: bool = False) -> bool:
        """Wait for the save in flight, and with `uploads` for uploads too; False if the save failed. Called before a
        rollback, before the next save and at the end of the run."""
        saved = True
        if self._saving:
            save, future = self._saving
            try:
                future.result()
                self._report_save(job, save)
            except OSError as error:
                saved = False
                job.recorder.event("save_failed", step=save.step, reason=str(error))
                job.recorder.disk_full = bool(job.recorder.run.unwritten)  # neither records nor states can be written
            finally:
                self._saving = None
        while uploads and self._uploading:
            self._report_upload(job)
        return saved

    def _report_save(self, job: Job, save: PendingSave) -> None:
        self._last = save
        if self._unconfirmed is not None:
            self._unconfirmed.append((save.step, save.folder))
        job.recorder.event(
            "saved", step=save.step, checkpoint=save.folder.name, stall_s=round(save.stall_s, 3),
            seconds=round(save.seconds, 3), **save.details,
        )  # fmt: skip
        if self.remote:
            self._next_upload = save.folder  # if uploads are slower than saves, the newest is next
            self._start_upload(job)

    def _start_upload(self, job: Job) -> None:
        remote, folder = self.remote, self._next_upload
        if remote is None or folder is None or self._uploading:
            return
        rules, confirming = job.spec.checkpoint, job.spec.guard.enabled
        work = in_background(lambda: remote.mirror(self.store, folder, rules, confirming), f"upload-{folder.name}")
        self._uploading, self._next_upload = (folder, work), None

    def _report_upload(self, job: Job) -> None:
        assert self._uploading
        folder, future = self._uploading
        try:
            job.recorder.event("uploaded", checkpoint=folder.name, **future.result())
        except (OSError, DamagedCheckpoint) as error:  # the local one is intact; the next save tries again
            job.recorder.event("upload_failed", checkpoint=folder.name, reason=str(error))
        finally:
            self._uploading = None
        self._start_upload(job)

    def confirm(self, job: Job, done: int) -> None:
        """Mark checkpoints as healthy once enough steps without an incident followed. Costs nothing at most steps."""
        if self._unconfirmed is None:
            confirmed = set(self.store.confirmed())
            self._unconfirmed = [(m.step, path) for path, m in self.store.committed() if path not in confirmed]
        while self._unconfirmed and done - max(self._unconfirmed[0][0], job.guard.last_incident_step) > CONFIRMED_STEPS:
            _, folder = self._unconfirmed.pop(0)
            try:
                if job.world.main:
                    self.store.confirm(folder)
            except OSError as error:  # it is intact, but not used for rollbacks
                job.recorder.event("save_failed", step=done, reason=f"{folder.name} cannot be confirmed: {error}")

    def save_scene(self, job: Job, scenes: CheckpointStore, step: int) -> Path:
        """Save the state that a step was judged with to another store. Raises OSError if the disk refuses."""
        self.wait(job)  # one save at a time: ranks share one channel for it
        return scenes.save(job.state(), self.manifest(job, step, None))

    def abandon(self, job: Job, after_step: int) -> list[str]:
        """After a rollback to `after_step`, delete later checkpoints, local and remote; their names."""
        self.wait(job)
        self._next_upload = None
        names = job.world.agree(self.store.abandon(after_step) if job.world.main else [])
        self._unconfirmed = None
        if self.remote and names:
            self.wait(job, uploads=True)
            try:
                self.remote.abandon(after_step, self.store.tagged())
            except OSError as error:  # retention after the next upload deletes them
                job.recorder.event("upload_failed", reason=f"abandoned checkpoints are still there: {error}")
        return names

    def interval_s(self, job: Job) -> float | None:
        """Seconds between saves under `auto`, from the cost of the last save; None if the spec sets the interval. Ranks
        may differ; the loop saves when one of them is due."""
        if job.spec.checkpoint.every != "auto":
            return None
        if self._interruptions is None:
            self._interruptions = count_interruptions(job.recorder.run.events())
        mtti_s = mean_time_to_interruption(1, self._interruptions, job.recorder.progress.elapsed_s)
        last = self._last
        return save_interval(last.stall_s if last else None, last.seconds if last else 0.0, mtti_s)
