"""Restores the state that a run starts from: its newest checkpoint that verifies, another run's, or a weights folder.

Also reads a run's records: the normal range of its losses, its best stretch, the checkpoints that it should have.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bessemer.checkpoint.base import CheckpointWeights, FrozenBase, Kind
from bessemer.checkpoint.lineage import LINEAGE, abandon_all, record_lineage, repair_lineage
from bessemer.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, read_manifest, verify_file
from bessemer.checkpoint.remote import RemoteCheckpoints, recover
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.order import Segment, StepPositions
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.errors import UserError
from bessemer.guard.judge import LOSS, JudgedNumber
from bessemer.model.adapters import check_scale, init_adapters, is_part
from bessemer.model.families.adapter import read_adapter
from bessemer.model.quantized import check_quantized
from bessemer.parallel.shard import free_gathered_weights
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import to_number
from bessemer.run.snapshot import NAME as RUN_COPY
from bessemer.run.snapshot import PLAN, SPEC, read_snapshot
from bessemer.session.build import open_remote, spec_fingerprint
from bessemer.session.data import describe_file_changes
from bessemer.session.models import COMPANIONS, ModelSource, load_trained
from bessemer.session.start import WeightSource, load_source
from bessemer.spec.adapter import read_peft
from bessemer.spec.guard import GuardSpec
from bessemer.spec.load import load_spec, parse_yaml, validate
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.train.frozen import find_base, still_frozen
from bessemer.train.job import Adjustment, Job, Progress
from bessemer.train.saver import package_versions
from bessemer.trial.case import NormalRange

NEW_MOMENTS_STEPS, NEW_MOMENTS_STAGES = 40, 8  # 2 / (1 - beta2) steps


@dataclass(frozen=True)
class PreviousStart:
    """Spec and plan of the checkpoint to continue from; both None for a run with nothing saved."""

    spec: RunSpec | None = None
    plan: Plan | None = None


def prepare_checkpoints(spec: RunSpec, run: RunWriter, restart: bool, event: Callable[..., None]) -> None:
    """Removes unfinished saves and downloads what only the remote tier has. With `restart`, sets all checkpoints aside.
    Raises UserError if the run had checkpoints and none is left."""
    remote, store = open_remote(spec, run.folder), CheckpointStore(run.checkpoints)
    if restart:
        set_aside(run, remote)
    sweep(run, store, event)
    if remote:
        recover(store, remote, event)
    if not any(store.newest_first()):
        refuse_start_over(run, store)


def restore(
    job: Job, spec: RunSpec, previous: PreviousStart, source: WeightSource | None, others: Sequence[ModelSource] = ()
) -> str | None:
    """Loads the newest checkpoint, or the weights that a new run starts from, and records the lineage. Returns the name
    of the checkpoint, None for a new run."""
    run, world = job.recorder.run, job.world
    with world.main_process_first():
        restored = restore_newest(job, CheckpointStore(run.checkpoints, world), previous.spec)
    if restored is not None:
        refill_history(job)
        if spec.adapter and job.plan.adapter:
            check_scale(job.engine.model, read_peft(spec.adapter).scale(*job.plan.adapter), restored)
        base = FrozenBase.of(read_manifest(run.checkpoints / restored))
        if spec.adapter:
            check_quantized(job.engine.model, base.quantized if base else (), restored)
        if base:
            check_base_path(base, spec, source)
        job.engine.base = still_frozen(base, job.engine.model, world)
    else:
        with job.engine.optimizer.writable_weights(job.engine.model):
            load_trained(job.engine.model, others, spec.seed)
    if restored is None and spec.start_from:
        start_from(job, Path(spec.start_from))
        start_adapters(job, spec)
        set_base(job, "checkpoint", spec.start_from)
    elif restored is None and source is not None:
        start_from_folder(job, source)
        start_adapters(job, spec)
        if source.family is not None:
            set_base(job, "hf_body" if job.engine.model.shape.labels else "hf", source.folder.path)
        elif spec.adapter is not None:
            set_base(job, "wrapped", source.folder.path)
    if world.main:
        if damage := repair_lineage(run.folder):
            job.recorder.event("records_repaired", file=f"checkpoints/{LINEAGE}", reason=damage)
        record_lineage(
            run.folder, stream_fingerprint=job.data.stream.fingerprint, spec_fingerprint=spec_fingerprint(spec),
            versions=package_versions(), resumed_from=restored, started_from=spec.start_from,
        )  # fmt: skip
    world.wait()
    return restored


def check_base_path(base: FrozenBase, spec: RunSpec, source: WeightSource | None) -> None:
    """Refuses a resume with other frozen weights than those that the run started from."""
    key, path = ("start_from", spec.start_from) if spec.start_from else ("model.hf", source and str(source.folder.path))
    if path and os.path.realpath(os.path.expanduser(path)) != os.path.realpath(base.path):
        raise UserError(
            f"{key}: {path}: the frozen weights of this run are those of {base.path}: write that path, or another name "
            "for a new run"
        )


def start_from_folder(job: Job, source: WeightSource) -> None:
    """Loads the weights of a Hugging Face folder."""
    with job.engine.optimizer.writable_weights(job.engine.model):
        added = load_source(job.engine.model, source)
    saved = job.spec.adapter.modules_to_save if job.spec.adapter else []
    if added and job.spec.adapter and "embedding" not in saved:
        raise UserError(
            f"adapter.modules_to_save: {added} tokens are new, and the adapter freezes their embeddings: write "
            "modules_to_save: [embedding]"
            + ("" if job.engine.model.shape.tied else ", or [embedding, head]")
            + ("; tokenizer.chat: plain needs no new tokens" if job.spec.tokenizer.chat in ("chatml", "llama3") else "")
        )
    if job.engine.ema:
        job.engine.ema.restart()
    more = f"; {added} new tokens, initialised to the mean of the others" if added else ""
    job.recorder.event("started_from", checkpoint=str(source.folder.path), reason=f"{source.name} weights{more}")


def start_adapters(job: Job, spec: RunSpec) -> None:
    """Initialises the adapters of a new run beside the weights that it has loaded, or loads those of a folder."""
    if spec.adapter is None or job.plan.adapter is None:
        return
    adapter, model = read_peft(spec.adapter), job.engine.model
    given = read_adapter(adapter.path, model.shape) if adapter.path else None
    with job.engine.optimizer.writable_weights(model):
        init_adapters(model, adapter, adapter.scale(*job.plan.adapter), spec.seed, given)
    free_gathered_weights(model)
    if job.engine.ema:
        job.engine.ema.restart()
    if given:
        job.recorder.event("adapter_loaded", path=adapter.path, reason=f"{len(given)} tensors of {adapter.path}")


def set_base(job: Job, kind: Kind, path: str | Path) -> None:
    """After a start from other weights: checkpoints leave out the frozen ones that are there."""
    base = job.engine.base = find_base(job.engine, kind, path)
    if base is not None:
        held = sum(math.prod(tensor.shape) * tensor.torch_dtype.itemsize for tensor in base.tensors.values())
        reason = f"checkpoints leave out {len(base.tensors)} frozen tensors ({human_bytes(held)}), which {path} holds"
        job.recorder.event("frozen_base", path=base.path, fingerprint=base.fingerprint, reason=reason)


def bitwise_since(events: Iterable[Mapping[str, Any]]) -> int:
    """The step since which a run rounds its sums as it does now."""
    return max((int(to_number(e.get("step")) or 0) for e in events if e.get("kind") == "digits_may_differ"), default=0)


def refill_history(job: Job) -> None:
    """After a restore: reads the records of the last steps, which trials compare with."""
    size = job.recorder.history.maxlen or 0
    records = [r for r in job.recorder.run.metrics() if r["step"] < job.start_step][-size:] if job.world.main else []
    job.recorder.history.extend(job.world.agree(records))


def recent_records(job: Job) -> list[dict[str, Any]]:
    """The last steps, as a report shows them."""
    keys = ("step", "loss", "grad_norm", "lr", "veto")
    return [{key: record[key] for key in keys} for record in job.recorder.history]


def normal_range(history: Iterable[dict[str, Any]], guard: GuardSpec, judged: JudgedNumber = LOSS) -> NormalRange:
    """The normal range, from the block of 32 accepted steps with the lowest median loss."""
    block = lowest_block([record for record in history if record["veto"] is None])
    losses = [float(record["loss"]) for record in block] or [float("nan")]
    norms = [float(record["grad_norm"]) for record in block] or [float("nan")]
    loss, norm = statistics.median(losses), statistics.median(norms)
    spread = 1.4826 * statistics.median(abs(value - loss) for value in losses)
    scale = max(spread, 0.02 * (abs(loss) + judged.row))
    return NormalRange(loss, scale, max(norm, judged.least_norm), 0.25, guard.loss_sigma, guard.grad_sigma)


def lowest_block(records: Sequence[dict[str, Any]], size: int = 32) -> list[dict[str, Any]]:
    """The best stretch of a run: the block of `size` records with the lowest median loss."""
    blocks = [list(records[i : i + size]) for i in range(0, len(records), size)] if records else [[]]
    full = [block for block in blocks if len(block) == size] or blocks
    return min(full, key=lambda block: statistics.median(r["loss"] for r in block) if block else float("inf"))


def end_of_best_stretch(history: Sequence[dict[str, Any]]) -> int:
    """The step after the run's best stretch: slow trouble began after it."""
    block = lowest_block([record for record in history if record["veto"] is None and to_number(record["loss"])])
    return int(block[-1]["step"]) + 1 if block else 0


def differences(old: Any, new: Any, key: str = "") -> dict[str, list[Any]]:
    """Changed leaves of two specs: key -> [before, after]."""
    if isinstance(old, dict) and isinstance(new, dict):
        changes: dict[str, list[Any]] = {}
        for name in sorted(set(old) | set(new)):
            changes |= differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return changes
    return {} if old == new else {key: [old, new]}


def saved_checkpoints(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Checkpoints that should exist by the run's events, with their steps: saved or fetched, and not deleted since."""
    names: dict[str, int] = {}
    for event in events:
        kind, name = event.get("kind"), event.get("checkpoint")
        if kind == "restarted":
            names = {}
        elif kind in ("saved", "fetched", "restored") and isinstance(name, str):
            names[name] = int(to_number(event.get("step")) or 0)
        if kind != "uploaded":  # it lists removals from the remote tier
            for removed in (*_names(event.get("removed")), *_names(event.get("abandoned"))):
                names.pop(removed, None)
    return names


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def load_previous_start(run: Run) -> PreviousStart:
    """Reads spec and plan from the newest checkpoint, or from the run's files if an earlier version saved it."""
    for folder in CheckpointStore(run.checkpoints).newest_first():
        try:
            saved = run_files(folder)
        except DamagedCheckpoint:
            continue
        try:
            if saved:
                return PreviousStart(_spec(saved, folder), Plan.from_json(saved[PLAN].decode()))
            spec, plan = run.folder / SPEC, run.folder / PLAN
            return PreviousStart(
                load_spec(spec) if spec.exists() else None, Plan.from_json(plan.read_text()) if plan.exists() else None
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{run.folder / PLAN}: unreadable ({error}); put it back, or pass --restart to begin from step 0"
            ) from None
    return PreviousStart()


def run_files(checkpoint: Path) -> dict[str, bytes]:
    """The run's files as saved in a checkpoint, verified; empty for checkpoints of earlier versions."""
    manifest = read_manifest(checkpoint)
    if RUN_COPY not in manifest.files:
        return {}
    verify_file(checkpoint / RUN_COPY, manifest)
    return read_snapshot(checkpoint)


def _spec(saved: Mapping[str, bytes], checkpoint: Path) -> RunSpec | None:
    return validate(parse_yaml(saved[SPEC].decode(), f"{checkpoint / RUN_COPY}:{SPEC}")) if SPEC in saved else None


def sweep(run: Run, store: CheckpointStore, event: Callable[..., None]) -> None:
    """Removes unfinished saves, and reports checkpoints without a manifest."""
    if swept := store.sweep(saved_checkpoints(run.events())):
        event("swept", checkpoints=swept, reason=f"{len(swept)} saves that never finished were removed")
    for folder in store.without_manifest():
        event("checkpoint_passed_over", checkpoint=folder.name, reason=f"{folder / NAME}: missing")


def restore_newest(job: Job, store: CheckpointStore, saved_spec: RunSpec | None) -> str | None:
    """Loads the newest checkpoint that verifies; damaged ones are passed over with an event. Returns its name, or None
    for a run that has saved nothing yet. Raises UserError rather than start over a run that has."""
    errors = []
    for folder in store.newest_first():
        try:
            load_checkpoint(job, store, folder, saved_spec)
        except DamagedCheckpoint as error:
            job.recorder.event("checkpoint_passed_over", checkpoint=folder.name, reason=str(error))
            errors.append(str(error))
            continue
        return folder.name
    refuse_start_over(job.recorder.run, store, errors)
    job.recorder.run.remove_metrics_from(0)
    return None


def refuse_start_over(run: Run, store: CheckpointStore, errors: Sequence[str] = ()) -> None:
    """Raises UserError if there should be a checkpoint to continue from. `errors` are those of existing checkpoints."""
    errors = [*errors, *(f"{folder / NAME}: missing" for folder in store.without_manifest())]
    saved = saved_checkpoints(run.events())
    if not errors and saved:
        newest = max(saved, key=lambda name: saved[name])
        errors = [f"{run.checkpoints / newest}: missing, but the events list it"]
    if not errors and any(run.metrics()) and not any(run.events("started")):
        errors = [f"{run.events_path}: has no start event for the steps in {run.steps_path}"]
    if errors:
        raise UserError(
            f"{errors[0]}. No checkpoint verifies. Refusing to start over; pass --restart to begin from step 0."
        )


def set_aside(run: RunWriter, remote: RemoteCheckpoints | None) -> None:
    """Before a restart from step 0: moves the checkpoints to `abandoned/` and deletes the metrics."""
    if remote and (uploaded := remote.committed()):
        raise UserError(
            f"--restart: {remote.url} holds {len(uploaded)} checkpoints of this run, which a later start would fetch: "
            "delete them, or give the run another name"
        )
    moved = abandon_all(run.checkpoints)
    if moved or any(run.events("started")) or any(run.metrics()):
        run.remove_metrics_from(0)
        run.event("restarted", abandoned=moved, reason=f"--restart: {len(moved)} checkpoints are set aside")


def start_from(job: Job, folder: Path) -> None:
    """Loads only the weights of another run's checkpoint or of an import; moments, window and data start fresh."""
    folder = Path(os.path.expanduser(folder))
    if not os.path.exists(folder / "manifest.json"):
        raise UserError(
            f"start_from: {folder} is not a checkpoint; give a folder such as runs/x/checkpoints/step-00001000.a1"
        )
    weights = {
        name: t
        for name, t in job.load_targets().items()
        if (name.startswith("model.") or name.endswith(".remainder"))
        and f"{COMPANIONS}." not in name
        and not is_part(name.removesuffix(".remainder"))
    }
    if any(map(is_part, CheckpointWeights(folder))):
        raise UserError(
            f"start_from: {folder} holds an adapter: merge it with `bessemer export RUN --to hf` and write model: "
            "{hf: FOLDER}, or start from its base with adapter: {path: FOLDER} (export --to peft)"
        )
    try:
        CheckpointStore(folder.parent).load(folder, weights)
    except DamagedCheckpoint as error:
        raise UserError(f"start_from: {error}") from None
    job.engine.finish_load(weights)
    if job.engine.ema:
        job.engine.ema.restart()
    job.recorder.event("started_from", checkpoint=folder.name, reason=f"weights of {folder}")


def load_checkpoint(
    job: Job, store: CheckpointStore, folder: Path, saved_spec: RunSpec | None, rewind: bool = True
) -> Manifest:
    """Verifies a checkpoint and loads it into the job, and its records into the run. Raises DamagedCheckpoint, or
    UserError if it was trained on other data. `saved_spec` is for a checkpoint without its own copy. Without `rewind`
    an iterable keeps its position: some cannot go back, and a rollback skips what was read."""
    state, saved = job.load_targets(), run_files(folder)
    saved_spec = _spec(saved, folder) or saved_spec
    if saved_spec and saved_spec.guard.window != job.spec.guard.window:  # a window of another size starts empty
        state = {name: tensor for name, tensor in state.items() if not name.startswith("guard.")}
    had_ema = saved_spec is None or saved_spec.optimizer.averages
    if job.engine.ema and not had_ema:  # the average starts now
        state = {name: tensor for name, tensor in state.items() if not name.startswith("ema.")}
    if saved_spec and (saved_spec.precision, saved_spec.loss_scale) != ("fp16", "dynamic"):  # the scale starts now
        state = {name: tensor for name, tensor in state.items() if not name.startswith("scaling.")}
    switched = saved_spec is not None and saved_spec.optimizer.name != job.spec.optimizer.name
    if switched:  # other moments, even under equal names
        state = {
            name: t for name, t in state.items() if not name.startswith("optimizer.") or name.endswith(".remainder")
        }
    refuse_other_data(job, read_manifest(folder), folder)
    # Not saved by earlier versions, or begun now.
    begun = [name for name in state if name.startswith(("optimizer.clipping.", "optimizer.lookahead."))]
    slow = [name for name in state if name.startswith("optimizer.") and name.endswith(".slow")]
    manifest = store.load(folder, state, optional=("guard.rows", *begun, *slow))
    job.engine.finish_load(state)
    if job.engine.ema and (switched or not had_ema):
        job.engine.ema.restart()
    load_run_state(job, state, manifest, rewind)
    if switched and saved_spec:
        begin_with_new_moments(job, saved_spec.optimizer.name)
    for repair in job.recorder.run.go_back(manifest.step, saved):
        job.recorder.view.event(repair)
    return manifest


def begin_with_new_moments(job: Job, previous: str) -> None:
    """After the optimizer was switched: its moments know nothing, so the learning rate rises in stages while they
    fill."""
    each = NEW_MOMENTS_STEPS // NEW_MOMENTS_STAGES
    for stage in range(NEW_MOMENTS_STAGES):
        first = job.start_step + stage * each
        job.guard.adjustments.append(Adjustment(first, first + each, (stage + 1) / (NEW_MOMENTS_STAGES + 1), 1.0))
    job.guard.changes[job.start_step] = "the optimizer was switched"
    job.recorder.event(
        "optimizer_switched", step=job.start_step,
        reason=f"{previous} -> {job.spec.optimizer.name}: new moments; the learning rate rises to the schedule's over "
        f"{NEW_MOMENTS_STEPS} steps",
    )  # fmt: skip


def load_run_state(job: Job, state: dict[str, torch.Tensor], manifest: Manifest, rewind: bool = True) -> None:
    """Loads everything but weights and moments, which are loaded in place."""
    job.guard.load_tensors(state)
    if manifest.guard:
        job.guard.load_state(manifest.guard)
    job.data.stream = job.data.stream.replace(
        StepPositions(job.data.stream.steps.batch_phases, [Segment.from_json(s) for s in manifest.segments]),
        banned_documents_of(manifest),
    )
    if rewind and isinstance(job.data.stream, IterableStream):
        job.data.stream.resume(manifest.step, manifest.stream_state)
    job.recorder.progress = Progress(**manifest.progress)
    job.start_step = manifest.step
    if changed := rounding_changes(job, manifest):
        job.recorder.event(
            "digits_may_differ", step=manifest.step,
            reason=f"{changed}: the last digits of losses may differ from those of an uninterrupted run",
        )  # fmt: skip


def rounding_changes(job: Job, manifest: Manifest) -> str:
    """Settings of this start that change the order of sums since the checkpoint; empty if there are none."""
    degrees = ({key: n for key, n in asdict(job.world.layout).items() if n > 1}, manifest.layout)
    layouts = [" x ".join(f"{key} {n}" for key, n in layout.items()) or "one process" for layout in degrees]
    now = {"threads": torch.get_num_threads(), "device": job.engine.device.type, "torch": package_versions()["torch"]}
    saved = {"threads": manifest.threads, "device": manifest.device, "torch": manifest.versions["torch"]}
    now["layout"], saved["layout"] = layouts
    return ", ".join(f"{key} {saved[key]} -> {now[key]}" for key in now if now[key] != saved[key])


def banned_documents_of(manifest: Manifest) -> dict[tuple[str, int], int]:
    """Excluded documents, with the position from which they are excluded."""
    return {(source, document): position for source, document, position in manifest.guard.get("bans", [])}


def refuse_other_data(job: Job, manifest: Manifest, folder: Path) -> None:
    """Raises UserError unless positions mean the same tokens and past steps read the same positions."""
    if manifest.stream_fingerprint != job.data.stream.fingerprint:
        changed = differences(manifest.stream, json.loads(json.dumps(job.data.stream.identity)))
        changes = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in changed.items())
        if files := describe_file_changes(job.recorder.run.folder, job.spec):
            changes = f"data files {files}; {changes}"
        raise UserError(
            f"{folder}: was trained on another data stream ({changes}), so its positions mean other tokens. "
            "Restore these settings, or give the run another name"
        )
    past = [entry for entry in manifest.batch_rows if entry[0] < manifest.step]
    now = [[p.from_step, p.rows] for p in job.data.stream.steps.batch_phases if p.from_step < manifest.step]
    if past != now:
        saved_batch, batch = (rows[-1][1] * job.plan.context for rows in (past, now))
        raise UserError(
            f"{folder}: its {manifest.step:,} steps had batches of {saved_batch:,} tokens, the spec says {batch:,}: "
            "to change the size from this step on, write budget.batch_changes: "
            f"[{{from_step: {manifest.step}, batch: {batch}}}]"
        )
