"""What a run's own records say of its past: what was usual, where it was best, since when its digits stand.

A job continued from its checkpoints: the newest that verifies, on the same data, with the same past.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bessemer.checkpoint.lineage import abandon_all
from bessemer.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, read_manifest, verify_file
from bessemer.checkpoint.remote import RemoteCheckpoints
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.order import Segment, StepPositions
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import number
from bessemer.run.snapshot import NAME as RUN_COPY
from bessemer.run.snapshot import PLAN, SPEC, read_snapshot
from bessemer.session.data import describe_file_changes
from bessemer.spec.load import load_spec, parse, validate
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job, Progress
from bessemer.train.saver import package_versions
from bessemer.trial.case import NormalRange


def digits_from(events: Iterable[Mapping[str, Any]]) -> int:
    """The step since which a run's sums are rounded as they are now."""
    return max((int(number(e.get("step")) or 0) for e in events if e.get("kind") == "digits_may_differ"), default=0)


def refill_history(job: Job) -> None:
    """After a restore: the records of the steps before, as if no process had ended. Trials compare with such steps."""
    size = job.recorder.history.maxlen or 0
    records = [r for r in job.recorder.run.metrics() if r["step"] < job.start_step][-size:] if job.world.main else []
    job.recorder.history.extend(job.world.agree(records))


def recent(job: Job) -> list[dict[str, Any]]:
    """What a report shows of the last steps."""
    keys = ("step", "loss", "grad_norm", "lr", "veto")
    return [{key: record[key] for key in keys} for record in job.recorder.history]


def usual(history: Iterable[dict[str, Any]], loss_sigma: float, grad_sigma: float) -> NormalRange:
    """What was usual, from the records: the block of 32 accepted steps with the lowest median loss."""
    block = lowest_block([record for record in history if record["veto"] is None])
    losses = [float(record["loss"]) for record in block] or [float("nan")]
    norms = [float(record["grad_norm"]) for record in block] or [float("nan")]
    loss, norm = statistics.median(losses), statistics.median(norms)
    spread = 1.4826 * statistics.median(abs(value - loss) for value in losses)
    return NormalRange(loss, max(spread, 0.02 * abs(loss)), norm, 0.25, loss_sigma, grad_sigma)


def lowest_block(records: Sequence[dict[str, Any]], size: int = 32) -> list[dict[str, Any]]:
    """The best stretch of a run: the block of so many records with the lowest median loss."""
    blocks = [list(records[i : i + size]) for i in range(0, len(records), size)] if records else [[]]
    whole = [block for block in blocks if len(block) == size] or blocks
    return min(whole, key=lambda block: statistics.median(r["loss"] for r in block) if block else float("inf"))


def best_before(history: Sequence[dict[str, Any]]) -> int:
    """The step after the run's best stretch: slow trouble began somewhere behind it."""
    block = lowest_block([record for record in history if record["veto"] is None and number(record["loss"])])
    return int(block[-1]["step"]) + 1 if block else 0


def differences(old: Any, new: Any, key: str = "") -> dict[str, list[Any]]:
    """Changed leaves of two specs: key -> [before, after]."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, list[Any]] = {}
        for name in sorted(set(old) | set(new)):
            found |= differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if old == new else {key: [old, new]}


def saved_checkpoints(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Checkpoints that a run's events say are there, with their steps: saved or fetched, and not deleted since."""
    names: dict[str, int] = {}
    for event in events:
        kind, name = event.get("kind"), event.get("checkpoint")
        if kind == "restarted":
            names = {}
        elif kind in ("saved", "fetched", "restored") and isinstance(name, str):
            names[name] = int(number(event.get("step")) or 0)
        if kind != "uploaded":  # which tells of what was removed from the remote tier
            for gone in (*_names(event.get("removed")), *_names(event.get("abandoned"))):
                names.pop(gone, None)
    return names


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def earlier_start(run: Run) -> tuple[RunSpec | None, Plan | None]:
    """Spec and plan of the newest checkpoint: its own copies, or for those of earlier versions the run's files. None
    for a run with nothing saved, which is planned as a new one."""
    for folder in CheckpointStore(run.checkpoints).newest_first():
        try:
            saved = run_files(folder)
        except DamagedCheckpoint:
            continue
        try:
            if saved:
                return _spec(saved, folder), Plan.from_json(saved[PLAN].decode())
            spec, plan = run.folder / SPEC, run.folder / PLAN
            return (
                load_spec(spec) if spec.exists() else None,
                Plan.from_json(plan.read_text()) if plan.exists() else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{run.folder / PLAN}: unreadable ({error}); put it back, or pass --restart to begin from step 0"
            ) from None
    return None, None


def run_files(checkpoint: Path) -> dict[str, bytes]:
    """The run's own files as a checkpoint keeps them, verified; empty for checkpoints of earlier versions."""
    manifest = read_manifest(checkpoint)
    if RUN_COPY not in manifest.files:
        return {}
    verify_file(checkpoint / RUN_COPY, manifest)
    return read_snapshot(checkpoint)


def _spec(saved: Mapping[str, bytes], checkpoint: Path) -> RunSpec | None:
    return validate(parse(saved[SPEC].decode(), f"{checkpoint / RUN_COPY}:{SPEC}")) if SPEC in saved else None


def sweep(run: Run, shelf: CheckpointStore, event: Callable[..., None]) -> None:
    """Remove what never became a checkpoint, and tell of one that has lost its manifest."""
    if swept := shelf.sweep(saved_checkpoints(run.events())):
        event("swept", checkpoints=swept, reason=f"{len(swept)} saves that never finished were removed")
    for folder in shelf.without_manifest():
        event("checkpoint_passed_over", checkpoint=folder.name, reason=f"{folder / NAME}: missing")


def restore_newest(job: Job, shelf: CheckpointStore, former: RunSpec | None) -> str | None:
    """Load the newest checkpoint that verifies; damaged ones are passed over with an event. Its name, or None for a run
    that has saved nothing yet. A run that has is never started over."""
    faults = []
    for folder in shelf.newest_first():
        try:
            load_checkpoint(job, shelf, folder, former)
        except DamagedCheckpoint as error:
            job.recorder.event("checkpoint_passed_over", checkpoint=folder.name, reason=str(error))
            faults.append(str(error))
            continue
        return folder.name
    refuse_start_over(job.recorder.run, shelf, faults)
    job.recorder.run.cut_after(0)
    return None


def refuse_start_over(run: Run, shelf: CheckpointStore, faults: Sequence[str] = ()) -> None:
    """Raise UserError if there was a checkpoint to go on from. `faults` are what is wrong with those that are there."""
    faults = [*faults, *(f"{folder / NAME}: missing" for folder in shelf.without_manifest())]
    saved = saved_checkpoints(run.events())
    if not faults and saved:
        newest = max(saved, key=lambda name: saved[name])
        faults = [f"{run.checkpoints / newest}: missing, and the events tell of it"]
    if not faults and any(run.metrics()) and not any(run.events("started")):
        faults = [f"{run.events_path}: does not tell of the start of the steps in {run.steps_path}"]
    if faults:
        raise UserError(
            f"{faults[0]}. No checkpoint verifies. Refusing to start over; pass --restart to begin from step 0."
        )


def set_aside(run: RunWriter, remote: RemoteCheckpoints | None) -> None:
    """Before a run is begun again from step 0: its checkpoints go to `abandoned/`, its metrics are deleted."""
    if remote and (there := remote.committed()):
        raise UserError(
            f"--restart: {remote.url} holds {len(there)} checkpoints of this run, and a later start would fetch them: "
            "delete them, or give the run another name"
        )
    moved = abandon_all(run.checkpoints)
    if moved or any(run.events("started")) or any(run.metrics()):
        run.cut_after(0)
        run.event("restarted", abandoned=moved, reason=f"--restart: {len(moved)} checkpoints are set aside")


def start_from(job: Job, folder: Path) -> None:
    """Begin with the weights of another run's checkpoint or of an import; moments, window and data start anew."""
    folder = Path(os.path.expanduser(folder))
    if not os.path.exists(folder / "manifest.json"):
        raise UserError(
            f"start_from: {folder} is not a checkpoint; give a folder such as runs/x/checkpoints/step-00001000.a1"
        )
    weights = {
        name: t for name, t in job.load_targets().items() if name.startswith("model.") or name.endswith(".remainder")
    }
    try:
        CheckpointStore(folder.parent).load(folder, weights)
    except DamagedCheckpoint as error:
        raise UserError(f"start_from: {error}") from None
    job.engine.finish_load(weights)
    if job.engine.ema:
        job.engine.ema.restart()
    job.recorder.event("started_from", checkpoint=folder.name, reason=f"weights of {folder}")


def load_checkpoint(
    job: Job, shelf: CheckpointStore, folder: Path, former: RunSpec | None, rewind: bool = True
) -> Manifest:
    """Verify it and put it into the job, and its records into the run. Raises Damaged, or UserError where it belongs to
    other data. `former` is the spec of a checkpoint that has no copy of its own. Without `rewind` an iterable stays
    where it has been read to: some cannot be put back, and a rollback skips what has passed."""
    state, saved = job.load_targets(), run_files(folder)
    former = _spec(saved, folder) or former
    if former and former.guard.window != job.spec.guard.window:  # another window starts empty
        state = {name: tensor for name, tensor in state.items() if not name.startswith("guard.")}
    had_ema = former is None or former.optimizer.ema is not None
    if job.engine.ema and not had_ema:  # an average that begins now
        state = {name: tensor for name, tensor in state.items() if not name.startswith("ema.")}
    if former and (former.precision, former.loss_scale) != ("fp16", "dynamic"):  # a scale that begins now
        state = {name: tensor for name, tensor in state.items() if not name.startswith("scaling.")}
    refuse_other_data(job, read_manifest(folder), folder)
    manifest = shelf.load(folder, state, optional=("guard.rows",))  # which earlier versions did not save
    job.engine.finish_load(state)
    if job.engine.ema and not had_ema:
        job.engine.ema.restart()
    accept_state(job, state, manifest, rewind)
    for repair in job.recorder.run.go_back(manifest.step, saved):
        job.recorder.view.event(repair)
    return manifest


def accept_state(job: Job, state: dict[str, torch.Tensor], manifest: Manifest, rewind: bool = True) -> None:
    """Everything besides weights and moments, which are loaded in place."""
    job.guard.load_tensors(state)
    if manifest.guard:
        job.guard.load_state(manifest.guard)
    job.data.stream = job.data.stream.replace(
        StepPositions(job.data.stream.steps.batch_phases, [Segment.from_json(s) for s in manifest.segments]),
        bans_of(manifest),
    )
    if rewind and isinstance(job.data.stream, IterableStream):
        job.data.stream.resume(manifest.step, manifest.stream_state)
    job.recorder.progress = Progress(**manifest.progress)
    job.start_step = manifest.step
    if changed := rounds_otherwise(job, manifest):
        job.recorder.event(
            "digits_may_differ", step=manifest.step,
            reason=f"{changed}: the losses go on, their last digits may differ from an unbroken run's",
        )  # fmt: skip


def rounds_otherwise(job: Job, manifest: Manifest) -> str:
    """What of this start makes sums in another order than those that a checkpoint came from; empty if nothing does."""
    degrees = ({key: n for key, n in asdict(job.world.layout).items() if n > 1}, manifest.layout)
    words = [" x ".join(f"{key} {degree}" for key, degree in found.items()) or "one process" for found in degrees]
    here = {"threads": torch.get_num_threads(), "device": job.engine.device.type, "torch": package_versions()["torch"]}
    there = {"threads": manifest.threads, "device": manifest.device, "torch": manifest.versions["torch"]}
    here["layout"], there["layout"] = words
    return ", ".join(f"{key} {there[key]} -> {here[key]}" for key in here if here[key] != there[key])


def bans_of(manifest: Manifest) -> dict[tuple[str, int], int]:
    """Documents that were left out so far, and from which position on."""
    return {(source, document): position for source, document, position in manifest.guard.get("bans", [])}


def refuse_other_data(job: Job, manifest: Manifest, folder: Path) -> None:
    """Positions must mean the same tokens, and past steps must have read the same positions."""
    if manifest.stream_fingerprint != job.data.stream.fingerprint:
        changed = differences(manifest.stream, json.loads(json.dumps(job.data.stream.identity)))
        what = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in changed.items())
        if files := describe_file_changes(job.recorder.run.folder, job.spec):
            what = f"data files {files}; {what}"
        raise UserError(
            f"{folder}: was trained on another data stream ({what}): its positions mean other tokens now. "
            "Put these back, or give the run another name"
        )
    past = [entry for entry in manifest.batch_rows if entry[0] < manifest.step]
    now = [[p.from_step, p.rows] for p in job.data.stream.steps.batch_phases if p.from_step < manifest.step]
    if past != now:
        was, asked = (rows[-1][1] * job.plan.context for rows in (past, now))
        raise UserError(
            f"{folder}: its {manifest.step:,} steps had batches of {was:,} tokens, the spec says {asked:,}: "
            "to change the size from here on, write budget.batch_changes: "
            f"[{{from_step: {manifest.step}, batch: {asked}}}]"
        )
