"""A past step put on trial by hand: `bessemer replay RUN --step N`.

The state before the step comes from the scene that was kept of it, or from the newest checkpoint before, from which the
recorded steps are run again in memory. Nothing of the run is changed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from bessemer.checkpoint.manifest import Damaged, Manifest
from bessemer.checkpoint.shelf import Shelf
from bessemer.data.steps import Segment, Steps
from bessemer.errors import UserError
from bessemer.observe.view import RunView
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import number
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.supervise.build import Parts, make_job
from bessemer.supervise.past import digits_from, usual
from bessemer.supervise.replay import stream_of
from bessemer.supervise.restore import bans_of, rounds_otherwise
from bessemer.supervise.session import existing_run
from bessemer.supervise.start import choose_attention
from bessemer.train.device import pick_device, use_threads
from bessemer.train.job import Job
from bessemer.trial.case import Case, Earlier, Normal, Scene
from bessemer.trial.court import hold_trial
from bessemer.trial.measure import measure
from bessemer.trial.replay import replay_to

HISTORY = 512
BY_HAND = "tried by hand"  # the symptom of a step that nothing was wrong with when it ran


class OnlyRead(RunWriter):
    """A run's directory that nothing is written into."""

    def __init__(self, folder: str | Path) -> None:
        Run.__init__(self, folder)

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        return {"kind": kind, **details}


def job_of(folder: str | Path, device: str = "auto") -> tuple[Job, RunSpec]:
    """The job of an existing run, with fresh weights, that writes nothing."""
    run, spec = existing_run(folder)
    _, stream, data, plan = stream_of(folder)
    about = json.loads((run.folder / "model.json").read_text())
    asked = spec.parallel if device == "auto" else spec.parallel.model_copy(update={"device": device})
    use_threads(asked)
    parts = Parts(plan, ModelShape.from_dict(about["shape"]), stream, {}, data.tokenizer, pick_device(asked), 1.0)
    job = make_job(spec, parts, OnlyRead(folder), RunView())
    choose_attention(job, Plan(), Plan.from_json((run.folder / "plan.json").read_text()))
    return job, spec


def try_step(folder: str | Path, step: int, budget_s: float | None = None, device: str = "auto") -> Case:
    """What the trial says of a step of a run, vetoed or not."""
    job, spec = job_of(folder, device)
    if not 0 <= step < job.plan.total_steps:
        raise UserError(f"--step {step}: this run has steps 0 to {job.plan.total_steps - 1}")
    records = list(job.run.metrics())
    _bring_to(job, step, records)
    history = [record for record in records if record["step"] < step][-HISTORY:]
    recorded = next((record for record in records if record["step"] == step), None)
    batches = job.stream.micro_batches(step, job.plan.micro_rows)
    if recorded is None:  # rolled back past, or not reached
        found = measure(job, batches, job.stream.step_count(step))
        loss, norm, lr = found.loss, found.grad_norm, job.lr(step)
    else:
        loss, norm, lr = (number(recorded[key]) or float("nan") for key in ("loss", "grad_norm", "lr"))
    veto = next((event for event in job.run.events("veto") if event["step"] == step), None)
    symptom = veto["reason"] if veto else BY_HAND
    normal = _normal(veto, spec) or usual(history, spec.guard.loss_sigma, spec.guard.grad_sigma)
    scene = Scene(step, symptom, lr, loss, norm, normal, batches, history)
    budget_s = budget_s or spec.guard.trial.budget
    events = list(job.run.events())
    trial = hold_trial(job, scene, _earlier(job, step), budget_s, events, job.decode, _alike_from(job, events))
    keys = ("step", "loss", "grad_norm", "lr", "veto")
    return Case(
        run=job.run.name, step=step, time=time.time(), symptom=symptom,
        observed={"loss": loss, "grad_norm": norm, "lr": lr}, normal=normal, trial=trial,
        series=[{key: record[key] for key in keys} for record in records if abs(record["step"] - step) <= 100],
    )  # fmt: skip


def _normal(veto: dict[str, Any] | None, spec: RunSpec) -> Normal | None:
    found = veto["statistics"] if veto else {}
    values = [number(found.get(key)) for key in ("loss_center", "loss_scale", "grad_center", "grad_scale")]
    if any(value is None or value != value for value in values):
        return None
    loss, loss_scale, grad, grad_scale = (float(value) for value in values if value is not None)
    return Normal(loss, loss_scale, grad, grad_scale, spec.guard.loss_sigma, spec.guard.grad_sigma)


def _bring_to(job: Job, step: int, records: list[dict[str, Any]]) -> None:
    """The weights and moments before the step."""
    scenes = Shelf(job.run.folder / "scenes")
    for folder, manifest in scenes.committed():
        if manifest.step == step:
            _load(job, scenes, folder, manifest)
            return
    shelf = Shelf(job.run.checkpoints)
    for folder, manifest in reversed(shelf.committed()):
        if manifest.step <= step:
            try:
                _load(job, shelf, folder, manifest)
            except Damaged:
                continue
            replay_to(job, step, records)
            return
    # From the very beginning, if no step is missing: the first weights follow from the seed.
    replay_to(job, step, records)


def _load(job: Job, shelf: Shelf, folder: Path, manifest: Manifest) -> None:
    shelf.load(folder, _tensors(job))
    segments = [Segment.from_json(entry) for entry in manifest.segments]
    job.stream = job.stream.replace(Steps(job.stream.steps.batch_phases, segments), bans_of(manifest))
    job.start_step = manifest.step


def _tensors(job: Job) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in job.state().items() if not name.startswith("guard.")}


def _alike_from(job: Job, events: list[dict[str, Any]]) -> int:
    """The step since which the run computed as this process does: after its last, if it was trained by several."""
    committed = Shelf(job.run.checkpoints).committed()
    other = committed and rounds_otherwise(job, committed[-1][1])
    return job.plan.total_steps if other else digits_from(events)


def _earlier(job: Job, step: int) -> list[Earlier]:
    shelf = Shelf(job.run.checkpoints)
    found = []
    for folder, manifest in reversed(shelf.committed()):
        if manifest.step < step:

            def load(folder: Path = folder) -> None:
                shelf.load(folder, _tensors(job))

            found.append(Earlier(manifest.step, folder.name, load))
    return found
