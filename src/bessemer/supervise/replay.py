"""A past step's batch, rebuilt from the run's own records: the stream is a pure function, so nothing was kept of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.checkpoint.shelf import Shelf
from bessemer.data.chat import problems, render
from bessemer.data.document import Document
from bessemer.data.prepare import chat_template, open_prepared
from bessemer.data.read import BadRow, Part, divide, list_files, read_part
from bessemer.data.rows import PADDING
from bessemer.data.steps import Segment
from bessemer.data.store import Origin
from bessemer.data.stream import BatchStream
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.spec.data import SourceSpec
from bessemer.spec.schema import RunSpec
from bessemer.supervise.data import OWN, Data, open_data
from bessemer.supervise.feed import build_stream, make_rows
from bessemer.supervise.restore import bans_of
from bessemer.supervise.session import existing_run


def stream_of(folder: str | Path) -> tuple[Run, BatchStream, Data, TrainPlan]:
    """The data stream of an existing run."""
    run, spec = existing_run(folder)
    settings = run.folder / "settings.json"
    if not settings.exists():
        raise UserError(f"{folder}: the run stopped before its data was prepared; train it first")
    if any(source.path == [OWN] for source in spec.data.sources.values()):
        raise UserError(
            f"{folder}: was trained on a dataset from Python, which only the program that has it can replay"
        )
    plan = TrainPlan.from_json(settings.read_text())
    if spec.data.tokenize == "on_the_fly":
        data: Data = open_data(spec, Plan())
    else:
        data = open_prepared(Path(json.loads((run.folder / "data.json").read_text())["folder"]))
    decided = Plan.from_json((run.folder / "plan.json").read_text())
    rows = make_rows(spec, data, plan.context, Plan(), decided)
    committed = Shelf(run.checkpoints).committed()
    segments = [Segment.from_json(entry) for entry in committed[-1][1].segments] if committed else [Segment(0, 0)]
    stream = build_stream(spec, data, rows, plan, segments)
    assert isinstance(stream, BatchStream), "files can be read again"
    if committed:
        stream = stream.replace(banned=bans_of(committed[-1][1]))
    return run, stream, data, plan


def documents_of(folder: str | Path, step: int, texts: bool = False) -> list[dict[str, Any]]:
    """The documents of a step, those with most tokens first.

    `texts` adds the part of each that was in the batch, and looks it up in the file: `in_file` is `same` where the
    text stands there as it was trained on, `cleaned` where a step of the spec changed it, and otherwise what prevents
    the comparison. That costs a reading of each file up to the row.
    """
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
        for source, origin, tokens in _parts(stream, step):
            text = prepared.tokenizer.decode(tokens)
            found[source, origin.file, origin.row].setdefault("texts", []).append(text)
        _compare(list(found.values()), existing_run(folder)[1], prepared.tokenizer)
    return list(found.values())


def _parts(stream: BatchStream, step: int) -> Iterator[tuple[str, Origin, list[int]]]:
    """The documents' tokens in a step as targets, before noise and without padding."""
    plain = BatchStream(stream.sources, stream.order, stream.sequence_length, stream.steps)
    batch = plain.batch(step)
    for k, name in enumerate(stream.names):
        rows, at = stream.sources[name], np.flatnonzero(batch.sources == k)
        if not at.size:
            continue
        spans = rows.spans(batch.sequences[at])
        for i in np.flatnonzero(spans.document != PADDING).tolist():
            row, column, length = (int(found[i]) for found in (spans.row, spans.column, spans.length))
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
            if row and row.messages and not problems(row.messages):  # trained on as it is laid out
                text = tokenizer.decode(render(row.messages, tokenizer, template)[0].tolist())
            parts = [part.removesuffix(tokenizer.eos) for part in document["texts"]]
            # A row may begin or end inside a character of several tokens, which then shows as a replacement mark.
            same = text is not None and all(part.strip("�") in text for part in parts)
            document["in_file"] = "the row is gone" if text is None else "same" if same else "cleaned"
            if row and row.decode_error:
                document["in_file"] = f"the file is {row.decode_error}: U+FFFD was trained on for its invalid bytes"


def rows_of(source: SourceSpec, file: str, rows: Iterable[int]) -> dict[int, Document]:
    """Some rows of one of a source's files, as they stand there now."""
    entries = [entry for entry in list_files(source) if entry.name == file]
    if not entries:
        raise UserError(f"{file}: no longer among the source's files")
    wanted = set(rows)
    found: dict[int, Document] = {}
    pieces = [piece for part in divide("", entries, source) for piece in part.pieces]
    for i, piece in enumerate(pieces):
        stop = pieces[i + 1].first_row if i + 1 < len(pieces) else None
        inside = {row for row in wanted if row >= piece.first_row and (stop is None or row < stop)}
        for document in read_part(Part("", (piece,)), source) if inside else ():
            if not isinstance(document, BadRow) and document.row in inside:
                found[document.row] = document
                inside.discard(document.row)
            if not inside:
                break
    return found
