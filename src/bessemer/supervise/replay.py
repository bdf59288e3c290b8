"""A past step's batch, rebuilt from the run's own records: the stream is a pure function, so nothing was kept of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bessemer.checkpoint.shelf import Shelf
from bessemer.data.prepare import Prepared, open_prepared
from bessemer.data.steps import Segment
from bessemer.data.stream import BatchStream
from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan
from bessemer.run.directory import Run
from bessemer.supervise.session import build_stream, existing_run


def stream_of(folder: str | Path) -> tuple[Run, BatchStream, Prepared, TrainPlan]:
    """The data stream of an existing run."""
    run, spec = existing_run(folder)
    settings = run.folder / "settings.json"
    if not settings.exists():
        raise UserError(f"{folder}: the run stopped before its data was prepared; train it first")
    plan = TrainPlan.from_json(settings.read_text())
    prepared = open_prepared(Path(json.loads((run.folder / "data.json").read_text())["folder"]))
    committed = Shelf(run.checkpoints).committed()
    segments = (
        [Segment.from_json(entry) for entry in committed[-1][1].segments] if committed else [Segment(0, 0)]
    )
    return run, build_stream(prepared, plan, spec.seed, segments), prepared, plan


def documents_of(folder: str | Path, step: int, texts: bool = False) -> list[dict[str, Any]]:
    """The documents of a step, those with most tokens first; `texts` adds the part of each that was in the batch."""
    _, stream, prepared, plan = stream_of(folder)
    if not 0 <= step < plan.total_steps:
        raise UserError(f"--step {step}: this run has steps 0 to {plan.total_steps - 1}")
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for share in stream.origins(step):
        found[share.source, share.file, share.row] = {
            "source": share.source, "file": share.file, "row": share.row, "document": share.document_id,
            "tokens": share.tokens,
        }  # fmt: skip
    if texts:
        batch = stream.batch(step)
        for row, number, origin in stream.locate(batch):
            source = stream.names[int(batch.sources[row])]
            inside = batch.documents[row] == number
            text = prepared.tokenizer.decode(batch.targets[row][inside].tolist())
            found[source, origin.file, origin.row].setdefault("texts", []).append(text)
    return list(found.values())
