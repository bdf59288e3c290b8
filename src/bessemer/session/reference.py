"""Log-probabilities of the reference, computed once and kept with the prepared data: `dpo.reference: stored`.

Each source and side has a file, `NAME.SIDE.reference-FINGERPRINT.npy`, with one number per document. The fingerprint
covers the reference's weights, the store, what documents begin with, the context and the precision. The run's folder
names the files that it reads, so that replays need no reference either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from bessemer.align.answers import REFERENCE
from bessemer.align.dpo import Dpo
from bessemer.data.prepare import Prepared
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.groups import GroupRows
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import PADDING, Rows
from bessemer.model.transformer import Decoder
from bessemer.observe.view import RunView
from bessemer.parallel.world import World
from bessemer.plan.decision import Plan
from bessemer.session.models import check_tokenizers, load_frozen, open_model, record_frozen
from bessemer.session.objectives import first_tokens
from bessemer.session.start import ResolvedRun
from bessemer.spec.mixture import quantise
from bessemer.spec.schema import RunSpec
from bessemer.storage import atomic_path, write_atomic
from bessemer.train.compile import compute_in, use_tf32

FILES = "reference.json"  # in the run's folder: the file of each source and side

Logps = npt.NDArray[np.float32]


def is_stored(spec: RunSpec) -> bool:
    return spec.objective == "dpo" and spec.dpo.needs_reference and spec.dpo.reference == "stored"


def store_reference(
    spec: RunSpec, resolved: ResolvedRun, world: World, view: RunView, folder: Path, previous: Plan | None
) -> None:
    """Gives the rows of a run the log-probabilities of its reference. Computes those that are not there."""
    if not is_stored(spec):
        return
    source, data, training = open_model(REFERENCE, spec.models[REFERENCE]), resolved.data, resolved.training
    assert isinstance(data, Prepared)
    check_tokenizers([source], data.tokenizer)
    view.activity("reading the reference")
    source.fingerprint = source.read_fingerprint()
    record_frozen(source, resolved.plan, previous)
    begins = first_tokens(spec, data.tokenizer)
    identity = [source.fingerprint, begins, data.tokenizer.eos_id, resolved.context, training.precision]
    files: dict[str, Path] = {}
    missing: dict[str, GroupRows] = {}
    parts = dict(_parts(resolved))
    for name, rows in parts.items():
        digest = xxhash.xxh3_64_hexdigest(json.dumps([*identity, rows.store.fingerprint]).encode())
        files[name] = data.folder / f"{name}.reference-{digest}.npy"
        if not _is_complete(files[name], rows):
            missing[name] = rows
    absent = {name for names in world.gather(list(missing)) for name in names}
    missing = {name: rows for name, rows in parts.items() if name in absent}
    if missing:
        objective = Dpo(spec.dpo, data.tokenizer.eos_id, begins)
        if world.layout.tp > 1:
            assert world.mesh is not None
            objective.tensors = world.mesh["tp"]
        model = load_frozen(source, world, spec, training.precision)
        objective.models = {REFERENCE: model}
        for name, rows in missing.items():
            view.activity(f"computing the reference's log-probabilities of {name}")
            with use_tf32(training.precision):
                logps = reference_logps(objective, model, rows, training.micro_rows, training.precision, world)
            if world.main:
                with atomic_path(files[name]) as temporary, open(temporary, "wb") as file:
                    np.save(file, logps)
        del model
        objective.models = {}
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    count = sum(rows.store.documents for rows in parts.values())
    origin = f"computed now: {', '.join(missing)}" if missing else "read from the data's folder"
    resolved.plan.add("dpo.reference", "stored", f"{count:,} answers, {origin}", "rule")
    if world.main:
        write_atomic(folder / FILES, json.dumps({name: str(path) for name, path in files.items()}, indent=1))
    world.wait()
    attach_reference(files, parts)


def attach_reference(files: Mapping[str, str | Path], parts: Mapping[str, GroupRows]) -> None:
    for name, rows in parts.items():
        rows.reference = np.load(files[name], mmap_mode="r")


def attach_recorded(folder: Path, rows: Mapping[str, Rows]) -> None:
    """The same for the rows of an existing run, if it reads stored log-probabilities."""
    if (folder / FILES).is_file():
        files = json.loads((folder / FILES).read_text(encoding="utf-8"))
        attach_reference(files, {f"{name}.train": each for name, each in rows.items() if isinstance(each, GroupRows)})


def _parts(resolved: ResolvedRun) -> Iterator[tuple[str, GroupRows]]:
    for name, rows in resolved.rows.items():
        if isinstance(rows, GroupRows):
            yield f"{name}.train", rows
    for name, held in resolved.held_out.items():
        if isinstance(held.rows, GroupRows) and held.rows.count:
            yield f"{name}.validation", held.rows


def _is_complete(path: Path, rows: GroupRows) -> bool:
    try:
        return bool(np.load(path, mmap_mode="r").shape == (rows.store.documents,))
    except (OSError, ValueError):  # missing, or cut off: it is computed again
        return False


@torch.no_grad()
def reference_logps(
    objective: Dpo, model: Decoder, rows: GroupRows, micro_rows: int, precision: str, world: World
) -> Logps:
    """The log-probability of every document's answer, on every rank; each computes some of the rows."""
    order = StreamOrder([MixturePhase(0, quantise({"rows": 1.0}))], {"rows": rows.count}, seed=0)
    size = micro_rows * world.layout.dp
    stream = BatchStream({"rows": rows}, order, rows.length, StepPositions([BatchPhase(0, size)]))
    logps_D = torch.zeros(rows.store.documents, dtype=torch.float64, device=world.device)
    for step in range(-(-rows.count // size)):
        batch = stream.batch(step, world.dp_rank, world.layout.dp)
        feed = objective.feed(batch, world.device)
        with compute_in(precision, world.device):
            counts = 2 * feed.fields["pairs"].shape[1]
            logps_BD = objective.reference_logps(feed, counts)
        spans = rows.spans(batch.sequences)
        real = np.flatnonzero(spans.document != PADDING)
        at = (torch.from_numpy(array[real]).to(world.device) for array in (spans.row, spans.number))
        logps_D[torch.from_numpy(spans.document[real]).to(world.device)] = logps_BD[tuple(at)].double()
    copies = world.size // world.layout.dp  # ranks that share rows
    return (world.add(logps_D) / copies).float().cpu().numpy()
