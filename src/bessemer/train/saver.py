"""Saves of a running job: what goes into the manifest, and what happens when the disk refuses."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bessemer.checkpoint.manifest import Manifest
from bessemer.checkpoint.shelf import Shelf
from bessemer.data.own_stream import ForwardStream
from bessemer.train.job import Job

PACKAGES = ("bessemer", "torch", "numpy", "tokenizers", "pydantic", "pyarrow")


def package_versions() -> dict[str, str]:
    """Python and the packages that can change a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


class CheckpointSaver:
    """Writes checkpoints of one job to its shelf and thins them out after each commit."""

    def __init__(self, shelf: Shelf, spec_fingerprint: str) -> None:
        self.shelf = shelf
        self.spec_fingerprint = spec_fingerprint

    def manifest(self, job: Job, step: int, validation_loss: float | None) -> Manifest:
        return Manifest(
            step=step, attempt=0, stream_fingerprint=job.stream.fingerprint, stream=job.stream.identity,
            spec_fingerprint=self.spec_fingerprint,
            segments=[segment.to_json() for segment in job.stream.steps.segments],
            batch_rows=[[phase.from_step, phase.rows] for phase in job.stream.steps.batch_phases],
            progress=job.progress.to_json(), threads=torch.get_num_threads(), device=job.device.type,
            versions=package_versions(), time=time.time(), validation_loss=validation_loss,
            stream_state=job.stream.state(step) if isinstance(job.stream, ForwardStream) else None,
        )  # fmt: skip

    def save(self, job: Job, step: int, validation_loss: float | None) -> str | None:
        """The checkpoint's name. A refused write is an event, not the end: the older checkpoints are still there."""
        began = time.perf_counter()
        try:
            job.run.sync()
            folder = self.shelf.save(job.state(), self.manifest(job, step, validation_loss))
        except OSError as error:
            job.event("save_failed", step=step, reason=str(error))
            return None
        details: dict[str, Any] = {}
        try:
            removed = self.shelf.thin(folder, job.spec.checkpoint.keep_last, job.spec.checkpoint.keep_best)
            details = {"removed": removed} if removed else {}
        except OSError as error:  # the save stands; the old ones are tried again after the next
            details = {"not_removed": str(error)}
        job.event(
            "saved",
            step=step,
            checkpoint=folder.name,
            seconds=round(time.perf_counter() - began, 3),
            **details,
        )
        return folder.name
