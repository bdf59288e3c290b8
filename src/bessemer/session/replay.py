"""Replays a past step of a run (`bessemer replay RUN --step N`): its documents, or a trial of it. Also evaluates other
weights on the run's validation data. The run is not changed.

The batch is rebuilt from the run's records, since the stream is a pure function. The state before the step comes from a
saved scene, or from an earlier checkpoint by replaying the recorded steps in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bessemer.align.rollout_stream import RolloutStream
from bessemer.align.rollouts import FOLDER as ROLLOUTS
from bessemer.checkpoint.archive import PackedTensors
from bessemer.checkpoint.manifest import DamagedCheckpoint, Manifest
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.data.prepare import chat_template, open_prepared
from bessemer.data.read import BadRow, SourcePart, divide_source, list_files, read_part
from bessemer.data.read.entry import Document
from bessemer.data.store.token_store import Origin
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import Segment, StepPositions
from bessemer.data.stream.rows import PADDING
from bessemer.data.tokenizer.chat import find_problems, render
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.transformer import build_model
from bessemer.observe.view import RunView
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run, RunWriter
from bessemer.run.journal import to_number
from bessemer.session.build import JobParts, choose_attention, make_job
from bessemer.session.data import PYTHON_SOURCE, Data, build_stream, held_out_rows, make_rows
from bessemer.session.models import open_models
from bessemer.session.objectives import make_objective
from bessemer.session.reference import attach_recorded
from bessemer.session.restore import banned_documents_of, bitwise_since, normal_range, rounding_changes
from bessemer.session.rl import open_prompts
from bessemer.session.session import existing_run
from bessemer.spec.data import SourceSpec
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import ParallelSpec, RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import pick_device, use_threads
from bessemer.train.evaluate import Evaluator
from bessemer.train.job import Job
from bessemer.trial.case import EarlierState, IncidentCase, NormalRange, StepScene
from bessemer.trial.measure import measure
from bessemer.trial.replay import replay_to
from bessemer.trial.trial import run_trial


def validator(folder: Path) -> Callable[[Mapping[str, Tensor]], float]:
    """A function from weights, by native names, to the validation loss. A call costs one evaluation of the run."""
    _, spec = existing_run(folder)
    if spec.objective in RL_OBJECTIVES:
        raise UserError(f"{folder}: an average is chosen by its loss, and this run has rewards: omit --greedy")
    run, stream, data, plan = stream_of(folder)
    device = pick_device(ParallelSpec())
    held_out = held_out_rows(spec, data, plan.context)
    sizes = plan.context, plan.evaluate_tokens, plan.micro_rows
    evaluator = Evaluator(held_out, *sizes, plan.precision, device)
    if not evaluator.available:
        raise UserError(f"{folder}: has no held-out data; omit --greedy, or train with data.validation")
    shape = json.loads((run.folder / "model.json").read_text())["shape"]
    model = build_model(ModelShape.from_dict(shape), device, spec.seed)
    objective = make_objective(spec, stream, data.tokenizer, model.shape, plan.context)

    @torch.no_grad()
    def loss(weights: Mapping[str, Tensor]) -> float:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        return evaluator.evaluate(model, objective).loss

    return loss


def packed_losses(checkpoint: Path, store: Path, name: str) -> tuple[float, float] | str:
    """The validation loss of a run's checkpoint and of its pack, or why there is none."""
    run = checkpoint.absolute().parent.parent
    if not (run / "events.jsonl").exists():
        return "the checkpoint is not in a run's folder"
    try:
        loss = validator(run)
    except UserError as error:
        return str(error)
    return loss(SavedTensors(checkpoint, MODEL)), loss(PackedTensors(store, name, MODEL))


def stream_of(folder: str | Path) -> tuple[Run, BatchStream | RolloutStream, Data, TrainPlan]:
    """An existing run with its data stream, data and training plan."""
    run, spec = existing_run(folder)
    settings = run.folder / "settings.json"
    if not settings.exists():
        raise UserError(f"{folder}: the run stopped before its data was prepared; train it first")
    if any(source.path == [PYTHON_SOURCE] for source in spec.data.sources.values()):
        raise UserError(
            f"{folder}: was trained on a dataset from Python, which only the program that passed it can replay"
        )
    plan = TrainPlan.from_json(settings.read_text())
    data: Data
    if spec.objective in RL_OBJECTIVES:
        data = open_prompts(spec, run.folder, {})
    else:
        data = open_prepared(Path(json.loads((run.folder / "data.json").read_text())["folder"]))
    rows = make_rows(spec, data, plan.context)
    attach_recorded(run.folder, rows)
    committed = CheckpointStore(run.checkpoints).committed()
    segments = [Segment.from_json(entry) for entry in committed[-1][1].segments] if committed else [Segment(0, 0)]
    stream = build_stream(spec, data, rows, plan, segments)
    if isinstance(stream, RolloutStream):
        stream.rounds.synthetic, stream.rounds.store.folder = False, run.folder / ROLLOUTS
    assert isinstance(stream, (BatchStream, RolloutStream)), "files are replayable"
    if committed:
        stream = stream.replace(banned=banned_documents_of(committed[-1][1]))
    return run, stream, data, plan


def documents_of(folder: str | Path, step: int, texts: bool = False) -> list[dict[str, Any]]:
    """The documents of a step, those with most tokens first.

    `texts` adds the part of each document that was in the batch, and compares it with the file: `in_file` is `same` if
    the file has this text, `cleaned` if a curation step changed it, and otherwise why they cannot be compared. That
    reads each file up to the row.
    """
    _, stream, prepared, plan = stream_of(folder)
    if not 0 <= step < plan.total_steps:
        raise UserError(f"--step {step}: this run has steps 0 to {plan.total_steps - 1}")
    documents: dict[tuple[str, str, int], dict[str, Any]] = {}
    for share in stream.origins(step):
        documents[share.source, share.file, share.row] = {
            "source": share.source, "file": share.file, "row": share.row, "document": share.document_id,
            "tokens": share.tokens,
        }  # fmt: skip
        if isinstance(stream, RolloutStream):
            prompt = stream.sources[share.source].prompts[share.document]
            documents[share.source, share.file, share.row]["prompt"] = prompt.text
    if isinstance(stream, RolloutStream):
        for source, origin, text in stream.texts(step) if texts else ():
            documents[source, origin.file, origin.row].setdefault("texts", []).append(text)
    elif texts:
        for source, origin, tokens in _parts(stream, step):
            text = prepared.tokenizer.decode(tokens)
            documents[source, origin.file, origin.row].setdefault("texts", []).append(text)
        _compare(list(documents.values()), existing_run(folder)[1], prepared.tokenizer)
    return list(documents.values())


def _parts(stream: BatchStream, step: int) -> Iterator[tuple[str, Origin, list[int]]]:
    """The tokens of each document in a step as targets, before noise and without padding."""
    plain = BatchStream(stream.sources, stream.order, stream.sequence_length, stream.steps)
    batch = plain.batch(step)
    for k, name in enumerate(stream.names):
        rows, at = stream.sources[name], np.flatnonzero(batch.sources == k)
        if not at.size:
            continue
        spans = rows.spans(batch.sequences[at])
        for i in np.flatnonzero(spans.document != PADDING).tolist():
            row, column, length = (int(array[i]) for array in (spans.row, spans.column, spans.length))
            tokens = batch.targets[at[row], column : column + length].tolist()
            yield name, rows.origin_of_document(int(spans.document[i])), tokens


def _compare(documents: list[dict[str, Any]], spec: RunSpec, tokenizer: Tokenizer) -> None:
    template = chat_template(spec.tokenizer)
    wanted: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in documents:
        wanted.setdefault((document["source"], document["file"]), []).append(document)
    for (name, file), group in wanted.items():
        try:
            rows = rows_of(spec.data.sources[name], file, {document["row"] for document in group})
        except UserError as error:
            for document in group:
                document["in_file"] = f"not compared: {error}"
            continue
        for document in group:
            row = rows.get(document["row"])
            text = row.text if row else None
            if row and row.messages and not find_problems(row.messages):  # trained on as rendered
                text = tokenizer.decode(render(row.messages, tokenizer, template)[0].tolist())
            parts = [part.removesuffix(tokenizer.eos) for part in document["texts"]]
            # A row may begin or end inside a character of several tokens, which decodes to a replacement mark.
            same = text is not None and all(part.strip("�") in text for part in parts)
            document["in_file"] = "the row is gone" if text is None else "same" if same else "cleaned"
            if row and row.decode_error:
                document["in_file"] = f"the file is {row.decode_error}: U+FFFD was trained on for its invalid bytes"


def rows_of(source: SourceSpec, file: str, rows: Iterable[int]) -> dict[int, Document]:
    """Some rows of a source's file, as the file has them now."""
    entries = [entry for entry in list_files(source) if entry.name == file]
    if not entries:
        raise UserError(f"{file}: is no longer among the source's files")
    wanted = set(rows)
    documents: dict[int, Document] = {}
    pieces = [piece for part in divide_source("", entries, source) for piece in part.pieces]
    for i, piece in enumerate(pieces):
        stop = pieces[i + 1].first_row if i + 1 < len(pieces) else None
        inside = {row for row in wanted if row >= piece.first_row and (stop is None or row < stop)}
        for document in read_part(SourcePart("", (piece,)), source) if inside else ():
            if not isinstance(document, BadRow) and document.row in inside:
                documents[document.row] = document
                inside.discard(document.row)
            if not inside:
                break
    return documents


HISTORY = 512
BY_HAND = "tried by hand"  # the symptom of a step that was not vetoed


class ReadOnlyRun(RunWriter):
    """A run's directory that is never written to."""

    def __init__(self, folder: str | Path) -> None:
        Run.__init__(self, folder)

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        return {"kind": kind, **details}


def job_of(folder: str | Path, device: str = "auto") -> tuple[Job, RunSpec]:
    """The job of an existing run, with fresh weights; it writes nothing."""
    run, spec = existing_run(folder)
    _, stream, data, plan = stream_of(folder)
    shape = ModelShape.from_dict(json.loads((run.folder / "model.json").read_text())["shape"])
    parallel = spec.parallel if device == "auto" else spec.parallel.model_copy(update={"device": device})
    use_threads(parallel)
    parts = JobParts(plan, shape, stream, {}, data.tokenizer, pick_device(parallel), 1.0, others=open_models(spec))
    job = make_job(spec, parts, ReadOnlyRun(folder), RunView())
    choose_attention(job.engine, Plan(), Plan.from_json((run.folder / "plan.json").read_text()))
    return job, spec


def try_step(folder: str | Path, step: int, budget_s: float | None = None, device: str = "auto") -> IncidentCase:
    """Runs a trial of a past step, vetoed or not."""
    job, spec = job_of(folder, device)
    if not 0 <= step < job.plan.total_steps:
        raise UserError(f"--step {step}: this run has steps 0 to {job.plan.total_steps - 1}")
    records = list(job.recorder.run.metrics())
    _load_state_before(job, step, records)
    history = [record for record in records if record["step"] < step][-HISTORY:]
    recorded = next((record for record in records if record["step"] == step), None)
    batches = job.data.stream.micro_batches(step, job.plan.micro_rows)
    if recorded is None:  # rolled back, or not reached
        measured = measure(job.engine, batches, job.data.stream.step_count(step))
        loss, norm, lr = measured.loss, measured.grad_norm, job.lr(step)
    else:
        loss, norm, lr = (to_number(recorded[key]) or float("nan") for key in ("loss", "grad_norm", "lr"))
    veto = next((event for event in job.recorder.run.events("veto") if event["step"] == step), None)
    symptom = veto["reason"] if veto else BY_HAND
    normal = _normal(veto, spec) or normal_range(history, spec.guard, job.engine.objective.judged)
    scene = StepScene(step, symptom, lr, loss, norm, normal, batches, history)
    budget_s = budget_s or spec.guard.trial.budget
    events = list(job.recorder.run.events())
    trial = run_trial(job, scene, _earlier(job, step), budget_s, events, job.data.decode, _bitwise_from(job, events))
    keys = ("step", "loss", "grad_norm", "lr", "veto")
    return IncidentCase(
        run=job.recorder.run.name, step=step, time=time.time(), symptom=symptom,
        observed={"loss": loss, "grad_norm": norm, "lr": lr}, normal=normal, trial=trial,
        series=[{key: record[key] for key in keys} for record in records if abs(record["step"] - step) <= 100],
    )  # fmt: skip


def _normal(veto: dict[str, Any] | None, spec: RunSpec) -> NormalRange | None:
    statistics = veto["statistics"] if veto else {}
    values = [to_number(statistics.get(key)) for key in ("loss_center", "loss_scale", "grad_center", "grad_scale")]
    if any(value is None or value != value for value in values):
        return None
    loss, loss_scale, grad, grad_scale = (float(value) for value in values if value is not None)
    return NormalRange(loss, loss_scale, grad, grad_scale, spec.guard.loss_sigma, spec.guard.grad_sigma)


def _load_state_before(job: Job, step: int, records: list[dict[str, Any]]) -> None:
    """Loads weights and moments from before the step."""
    scenes = CheckpointStore(job.recorder.run.folder / "scenes")
    for folder, manifest in scenes.committed():
        if manifest.step == step:
            _load(job, scenes, folder, manifest)
            return
    store = CheckpointStore(job.recorder.run.checkpoints)
    for folder, manifest in reversed(store.committed()):
        if manifest.step <= step:
            try:
                _load(job, store, folder, manifest)
            except DamagedCheckpoint:
                continue
            replay_to(job, step, records)
            return
    # From step 0, if no record is missing: the initial weights follow from the seed.
    replay_to(job, step, records)


def _load(job: Job, store: CheckpointStore, folder: Path, manifest: Manifest) -> None:
    store.load(folder, job.engine.state())
    segments = [Segment.from_json(entry) for entry in manifest.segments]
    job.data.stream = job.data.stream.replace(
        StepPositions(job.data.stream.steps.batch_phases, segments), banned_documents_of(manifest)
    )
    job.start_step = manifest.step


def _bitwise_from(job: Job, events: list[dict[str, Any]]) -> int:
    """The step since which the run rounded as this process does; its end if it never did."""
    committed = CheckpointStore(job.recorder.run.checkpoints).committed()
    changed = committed and rounding_changes(job, committed[-1][1])
    return job.plan.total_steps if changed else bitwise_since(events)


def _earlier(job: Job, step: int) -> list[EarlierState]:
    store = CheckpointStore(job.recorder.run.checkpoints)
    earlier = []
    for folder, manifest in reversed(store.committed()):
        if manifest.step < step:

            def load(folder: Path = folder) -> None:
                store.load(folder, job.engine.state())

            earlier.append(EarlierState(manifest.step, folder.name, load))
    return earlier
