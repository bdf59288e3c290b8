"""Saves of a running job: what goes into the manifest, what is written behind the loop's back, and what happens when
the disk or the storage refuses. Events are written by the loop's thread alone, at `poll` and `wait`.
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

from bessemer.checkpoint.dcp import Staging, State, in_background, state_bytes
from bessemer.checkpoint.manifest import DamagedCheckpoint, Manifest
from bessemer.checkpoint.remote import RemoteCheckpoints
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.plan.cost_model.goodput import interruptions, mean_time_to_interruption, save_interval
from bessemer.run.snapshot import NAME as RUN_COPY
from bessemer.train.job import Job
from bessemer.train.memory.snapshots import CONFIRMED_STEPS, processes_here

PACKAGES = ("bessemer", "torch", "numpy", "tokenizers", "pydantic", "pyarrow")
# A CPU's save goes to the background when it stood in the way for so long; below, the copy is not worth its memory.
WORTH_STAGING_S = 1.0


@cache
def package_versions() -> dict[str, str]:
    """Python and the packages that can change a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@dataclass
class PendingSave:
    """A save under way, or one that has ended."""

    step: int
    folder: Path
    began_s: float
    stall_s: float = 0.0  # for how long the loop stood still
    seconds: float = 0.0  # until it was committed
    details: dict[str, Any] = field(default_factory=dict)  # filled by the thread that writes


class CheckpointSaver:
    """Writes checkpoints of one job to its shelf, copies them to the remote tier and thins both out."""

    def __init__(self, shelf: CheckpointStore, spec_fingerprint: str, remote: RemoteCheckpoints | None = None) -> None:
        self.shelf, self.spec_fingerprint, self.remote = shelf, spec_fingerprint, remote
        self._staging = Staging()
        self._saving: tuple[PendingSave, Future[None]] | None = None
        self._uploading: tuple[Path, Future[dict[str, Any]]] | None = None
        self._next_upload: Path | None = None
        self._last: PendingSave | None = None  # the last that succeeded
        self._interruptions: int | None = None
        self._unconfirmed: list[tuple[int, Path]] | None = None  # None: not looked up yet

    def manifest(self, job: Job, step: int, validation_loss: float | None) -> Manifest:
        return Manifest(
            step=step, attempt=0, stream_fingerprint=job.data.stream.fingerprint, stream=job.data.stream.identity,
            spec_fingerprint=self.spec_fingerprint,
            segments=[segment.to_json() for segment in job.data.stream.steps.segments],
            batch_rows=[[phase.from_step, phase.rows] for phase in job.data.stream.steps.batch_phases],
            progress=job.recorder.progress.to_json(), threads=torch.get_num_threads(), device=job.engine.device.type,
            versions=package_versions(), time=time.time(), validation_loss=validation_loss,
            stream_state=job.data.stream.state(step) if isinstance(job.data.stream, IterableStream) else None,
            guard=copy.deepcopy(job.guard_state()),  # it is written later, and the guard goes on
            layout={key: degree for key, degree in asdict(job.world.layout).items() if degree > 1},
        )  # fmt: skip

    def save(self, job: Job, step: int, validation_loss: float | None) -> str | None:
        """The checkpoint's name; under an asynchronous save, the name it will have once `poll` has told of it.

        A refused write is an event, not the end: the older checkpoints are still there.
        """
        importlib.import_module("torch.distributed.checkpoint")  # over a second, which is no cost of the first save

        began_s = time.perf_counter()
        self.wait(job)
        save = PendingSave(step, self.shelf.reserve(step), began_s)
        state, manifest = job.state(), self.manifest(job, step, validation_loss)
        staged = self._stage(job, state) if self._goes_behind(job, state) else None
        if not all(job.world.gather(staged is not None)):  # one that has no room writes at once, and so do all
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

    def _goes_behind(self, job: Job, state: State) -> bool:
        """By this one's own clock and memory; all of them have to agree."""
        asked = job.spec.checkpoint.asynchronous
        if asked != "auto":
            return asked
        if self._staging.bytes:
            return True
        # The copy must leave room for the data path and the file cache: 70B parameters on 64 GPUs are 13 GB a rank.
        room = psutil.virtual_memory().available > 2 * state_bytes(state) * processes_here(job.world)
        slow = self._last is not None and self._last.stall_s > WORTH_STAGING_S
        return room and (job.engine.device.type == "cuda" or slow)

    def _stage(self, job: Job, state: State) -> State | None:
        try:
            return self._staging.copy(state)
        except RuntimeError as error:  # no such memory left: the save must still happen
            job.recorder.event("staging_failed", reason=f"{str(error).splitlines()[0]}: the save is synchronous")
            self._staging = Staging()
            return None

    def _work(self, job: Job, save: PendingSave, state: State, manifest: Manifest) -> Callable[[], None]:
        """What is to be done with a state that no longer changes. Reads nothing of the job that the loop changes."""
        rules, confirming, run = job.spec.checkpoint, job.spec.guard.enabled, job.recorder.run
        snapshot = run.snapshot()
        main, alone = job.world.main, job.world.size == 1
        uploads = [self._uploading[0]] if self._uploading else []
        busy = {path.name for path in [*uploads, self._next_upload] if path}

        def run_copy() -> dict[str, bytes]:
            run.sync()  # the metrics that the checkpoint counts on
            return {RUN_COPY: snapshot.pack()}

        def work() -> None:
            written = self.shelf.write(save.folder, state, manifest, run_copy)
            save.seconds = time.perf_counter() - save.began_s
            save.details = {"bytes": written.bytes}
            if not main:
                return
            try:
                if rules.archive_model_only and rules.keep_every and alone:
                    self.shelf.write_model(state, manifest, rules.keep_every)
            except OSError as error:
                save.details["archive_failed"] = str(error)
            try:
                if removed := self.shelf.thin(save.folder, rules, busy, confirming):
                    save.details["removed"] = removed
            except OSError as error:  # the save stands; the old ones are tried again after the next
                save.details["not_removed"] = str(error)

        return work

    def poll(self, job: Job) -> None:
        """Tell of what ended since the last call. Costs nothing when nothing did: call it at every step.

        Of several processes some hear of an end a step before the others. Nothing follows from it that they would have
        to do together: a save succeeds for all or fails for all, and the first one's word counts for what is confirmed.
        """
        if self._saving and self._saving[1].done():
            self.wait(job)
        if self._uploading and self._uploading[1].done():
            self._tell_upload(job)

    def wait(self, job: Job, uploads: bool = False) -> bool:
        """Wait for the save in flight, and if asked for the uploads; False if that save failed.

        Before a rollback, before the next save, and with `uploads` at the end of the run.
        """
        saved = True
        if self._saving:
            save, future = self._saving
            try:
                future.result()
                self._tell_save(job, save)
            except OSError as error:
                saved = False
                job.recorder.event("save_failed", step=save.step, reason=str(error))
                job.recorder.disk_full = bool(job.recorder.run.unwritten)  # neither records nor states can be written
            finally:
                self._saving = None
        while uploads and self._uploading:
            self._tell_upload(job)
        return saved

    def _tell_save(self, job: Job, save: PendingSave) -> None:
        self._last = save
        if self._unconfirmed is not None:
            self._unconfirmed.append((save.step, save.folder))
        job.recorder.event(
            "saved", step=save.step, checkpoint=save.folder.name, stall_s=round(save.stall_s, 3),
            seconds=round(save.seconds, 3), **save.details,
        )  # fmt: skip
        if self.remote:
            self._next_upload = save.folder  # where uploads are slower than saves, the newest goes next
            self._start_upload(job)

    def _start_upload(self, job: Job) -> None:
        remote, folder = self.remote, self._next_upload
        if remote is None or folder is None or self._uploading:
            return
        rules, confirming = job.spec.checkpoint, job.spec.guard.enabled
        work = in_background(lambda: remote.mirror(self.shelf, folder, rules, confirming), f"upload-{folder.name}")
        self._uploading, self._next_upload = (folder, work), None

    def _tell_upload(self, job: Job) -> None:
        assert self._uploading
        folder, future = self._uploading
        try:
            job.recorder.event("uploaded", checkpoint=folder.name, **future.result())
        except (OSError, DamagedCheckpoint) as error:  # the local one stands; the next save tries again
            job.recorder.event("upload_failed", checkpoint=folder.name, reason=str(error))
        finally:
            self._uploading = None
        self._start_upload(job)

    def confirm(self, job: Job, done: int) -> None:
        """Mark checkpoints as healthy that enough quiet steps have come after. Costs nothing at most steps."""
        if self._unconfirmed is None:
            known = set(self.shelf.confirmed())
            self._unconfirmed = [(m.step, path) for path, m in self.shelf.committed() if path not in known]
        while self._unconfirmed and done - max(self._unconfirmed[0][0], job.guard.last_incident_step) > CONFIRMED_STEPS:
            _, folder = self._unconfirmed.pop(0)
            try:
                if job.world.main:
                    self.shelf.confirm(folder)
            except OSError as error:  # it is not lost, only not yet trusted
                job.recorder.event("save_failed", step=done, reason=f"{folder.name} cannot be confirmed: {error}")

    def save_scene(self, job: Job, shelf: CheckpointStore, step: int) -> Path:
        """The judged state of a step on a shelf of its own. Raises OSError if the disk refuses."""
        self.wait(job)  # one save at a time: processes tell each other of theirs on one channel
        return shelf.save(job.state(), self.manifest(job, step, None))

    def abandon(self, job: Job, after_step: int) -> list[str]:
        """After a rollback to `after_step`, delete what was saved later, here and remotely; the names."""
        self.wait(job)
        self._next_upload = None
        names = job.world.agree(self.shelf.abandon(after_step) if job.world.main else [])
        self._unconfirmed = None
        if self.remote and names:
            self.wait(job, uploads=True)
            try:
                self.remote.abandon(after_step, self.shelf.tagged())
            except OSError as error:  # the next upload thins it out
                job.recorder.event("upload_failed", reason=f"abandoned checkpoints are still there: {error}")
        return names

    def interval_s(self, job: Job) -> float | None:
        """Seconds between saves under `auto`, from what the last save cost; None where the spec says how often.

        Of several processes each has its own opinion; the loop takes the first that is due.
        """
        if job.spec.checkpoint.every != "auto":
            return None
        if self._interruptions is None:
            self._interruptions = interruptions(job.recorder.run.events())
        mtti_s = mean_time_to_interruption(1, self._interruptions, job.recorder.progress.elapsed_s)
        last = self._last
        return save_interval(last.stall_s if last else None, last.seconds if last else 0.0, mtti_s)
