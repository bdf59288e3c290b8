"""The step before distillation with `distill.stored`: the teacher reads the rows of the run, once, and its most likely
tokens are stored for each column. A store that has the rows already is only opened; the teacher is not.

Each rank computes its share of the rows. Legend: R rows, T columns of the student, S of the teacher, U width of the
teacher, N predictions, K tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.order import MixturePhase, Segment, StreamOrder
from bessemer.data.stream.rows import PADDING, Rows, repeat_into
from bessemer.data.stream.teacher import HEADER, TRAIN, VALIDATION, Section, TeacherHeader, TeacherStore, sections_of
from bessemer.data.tokenizer.mapping import TokenMap
from bessemer.data.tokenizer.tokenizer import Tokenizer, end_token
from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder
from bessemer.parallel.world import World
from bessemer.session.data import build_stream
from bessemer.session.models import ModelSource, check_tokenizers, load_frozen, open_model, open_models
from bessemer.session.start import ResolvedRun
from bessemer.spec.mixture import quantise
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.schema import RunSpec
from bessemer.storage import write_atomic
from bessemer.train.compile import compute_in, use_tf32
from bessemer.train.distill import Distill, chunk_rows, with_rest
from bessemer.train.trained import prompt_format

SPARE = 1.05  # rows beyond the budget, for those that follow a skip after a rollback
LEAST_COVERED = 0.5
SEEN = "seen.json"  # size and time of the teacher's files when its weights were last compared
SAMPLE_TOKENS = 4096  # trained tokens that decide whether a mapped tokenizer covers enough

Ints = npt.NDArray[np.int64]
Predictions = tuple[Ints, npt.NDArray[np.float32]]  # (R, T, K) ids and (R, T, K + 1) log-probabilities


def store_teacher(
    spec: RunSpec, resolved: ResolvedRun, world: World, report: Callable[[str], None]
) -> TeacherStore | None:
    """The store with all rows that the run reads; None for a teacher that is in memory. Collective."""
    if spec.distill.stored is None:
        return None
    folder, splits = Path(spec.distill.stored).expanduser(), _splits(resolved)
    rows = _needed_rows(spec, resolved)
    exists = world.agree((folder / HEADER).exists() if world.main else None)
    store = TeacherStore(folder, writable=True) if exists else None
    if store is not None:
        _check(spec, store, {"sections": sections_of(splits)}, resolved)
        rows = rows[~store.stored[rows]]
    filled = bool(max(world.gather(rows.size)))
    if filled:
        store = _fill(spec, resolved, store, rows, world, report)
    assert store is not None
    if problem := world.agree(_check_teacher(spec, store, filled, report) if world.main else None):
        raise UserError(problem)
    _record(spec, resolved, store)
    return store


def _splits(resolved: ResolvedRun) -> dict[str, dict[str, Rows]]:
    if len(resolved.rows) < len(resolved.data.train):
        raise UserError("distill.stored: an iterable dataset has no rows to store predictions for: remove stored")
    return {TRAIN: dict(resolved.rows), VALIDATION: {name: held.rows for name, held in resolved.held_out.items()}}


def _needed_rows(spec: RunSpec, resolved: ResolvedRun) -> Ints:
    """The numbers of the rows that training and validation read."""
    live = spec.model_copy(update={"distill": spec.distill.model_copy(update={"stored": None})})
    training, sections = resolved.training, sections_of(_splits(resolved))
    stream = build_stream(live, resolved.data, resolved.rows, training, [Segment(0, 0)])
    assert isinstance(stream, BatchStream)
    needed = np.zeros(sum(section.rows for section in sections), np.bool_)
    read = int(stream.steps.range(max(0, training.total_steps - 1))[1] * SPARE) + 1
    orders = [(TRAIN, stream.order, read)]
    for name, held in resolved.held_out.items():
        if held.rows.count:  # as in `Evaluator`
            order = StreamOrder([MixturePhase(0, quantise({name: 1.0}))], {name: held.rows.count}, seed=0)
            count = -(-training.evaluate_tokens // training.context) + training.micro_rows
            orders.append((VALIDATION, order, min(held.rows.count, count)))
    for split, order, count in orders:
        first = [next(s.first for s in sections if (s.split, s.source) == (split, name)) for name in order.names]
        for start in range(0, count, 1 << 16):
            source, sequence, _ = order.resolve(np.arange(start, min(count, start + (1 << 16))))
            needed[np.array(first, np.int64)[source] + sequence] = True
    return np.flatnonzero(needed)


def _check(spec: RunSpec, store: TeacherStore, more: dict[str, Any], resolved: ResolvedRun) -> None:
    """Refuses a store of other rows, settings or another teacher."""
    wanted = {
        "top_k": spec.distill.top_k, "temperature": spec.distill.temperature, "context": resolved.context,
        "path": spec.models["teacher"].path,
    }  # fmt: skip
    if difference := store.header.difference(wanted | more):
        fix = "name another folder, or delete this one"
        raise UserError(f"distill.stored: {store.folder} was written for other settings ({difference}): {fix}")


def _check_teacher(spec: RunSpec, store: TeacherStore, compared: bool, report: Callable[[str], None]) -> str:
    """Why the teacher at the path of the spec is not the one whose rows are stored; empty if it is, or if no model is
    there: the store may have been copied here. Its weights are read if its files are not those of the last comparison.
    `compared`: they were, a moment ago."""
    other = spec.models["teacher"]
    if not os.path.exists(os.path.expanduser(other.path)):
        return ""
    try:
        source = open_model("teacher", other)
        seen, stamp = store.folder / SEEN, _stamp(source)
        if not compared and seen.exists() and json.loads(seen.read_text()) == stamp:
            return ""
        if not compared:
            report(f"comparing the teacher {source.place} with its stored predictions")
            if (weights := source.read_fingerprint()) != store.header.weights:
                return (
                    f"models.teacher: {source.place} has changed since its predictions were stored in {store.folder} "
                    f"(fingerprint {weights}, stored {store.header.weights}): put the teacher back, or delete the "
                    "folder to store those of the new one"
                )
        write_atomic(seen, json.dumps(stamp, indent=1))
    except UserError as error:
        return str(error)
    return ""


def _stamp(source: ModelSource) -> dict[str, list[int]]:
    """Size and time of the files that hold a model's weights."""
    places = {source.files.checkpoint or source.files.place}
    if source.files.checkpoint is None:
        places.add(source.files.hf_folder.path)  # an adapter's base
    files = sorted(file for place in places for file in place.rglob("*") if file.is_file())
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _fill(
    spec: RunSpec, resolved: ResolvedRun, store: TeacherStore | None, rows: Ints, world: World,
    report: Callable[[str], None],
) -> TeacherStore:  # fmt: skip
    """Loads the teacher and computes the rows that are missing. The teacher's memory is free afterwards."""
    (source,) = open_models(spec, ("teacher",))
    precision = resolved.training.precision
    report(f"loading the teacher {source.place}")
    model = load_frozen(source, world, spec, precision)
    reader = _choose_reader(spec, resolved, source, model)
    sections = sections_of(_splits(resolved))
    if store is None:
        header = TeacherHeader(
            spec.models["teacher"].path, source.fingerprint, source.shape.parameters, spec.distill.top_k or 1,
            spec.distill.temperature, resolved.context, reader.compared, sections,
        )  # fmt: skip
        with use_tf32(precision):
            header = replace(header, covered=world.agree(reader.check_coverage(rows, sections, precision)))
        with world.main_process_first():
            if world.main:
                TeacherStore.create(spec.distill.stored or "", header, reader.width)
        store = TeacherStore(spec.distill.stored or "", writable=True)
    elif store.header.weights != source.fingerprint:
        raise UserError(
            f"distill.stored: {store.folder} has rows of a teacher with weights {store.header.weights}, and those of "
            f"{source.place} are {source.fingerprint}: delete the folder, or name another"
        )
    own = np.array_split(rows, world.size)[world.rank]
    chunks = list(reader.chunks(own, sections))
    passes, done = max(world.gather(len(chunks))), 0
    for number in range(passes):  # every rank makes as many passes: layers may be gathered in them
        numbers = chunks[number] if number < len(chunks) else rows[:1]
        with use_tf32(precision), compute_in(precision, world.device):
            ids, log_p = reader.predict(numbers, sections)
        if number < len(chunks):
            store.write(numbers, ids, log_p)
            done += numbers.size
        report(f"the teacher reads row {done:,} of {own.size:,}")
    world.wait()
    return store


def _choose_reader(spec: RunSpec, resolved: ResolvedRun, source: ModelSource, model: Decoder) -> TeacherReader:
    """Same tokens, or the tokens of another tokenizer mapped to the student's."""
    tokenizer = resolved.data.tokenizer
    objective = Distill(spec.distill, spec.data.cross_documents)
    objective.models = {"teacher": model}
    vocab = min(resolved.shape.vocab, source.shape.vocab)
    reader = TeacherReader(objective, resolved, vocab, vocab)
    try:
        check_tokenizers([source], tokenizer)
    except UserError as error:
        if not (source.files.place / "tokenizer.json").is_file():
            raise UserError(f"{error} ({source.files.place} has no tokenizer.json to map)") from None
        other = Tokenizer.load(source.files.place / "tokenizer.json", _end_token(source.files.place))
        prompt = prompt_format(source.files.place, other)
        mapping = TokenMap(tokenizer, other, prompt.prefix or (prompt.start,))
        if spec.data.cross_documents:
            raise UserError(
                "data.cross_documents: a teacher with another tokenizer reads documents alone: remove it"
            ) from None
        return MappedReader(objective, resolved, mapping.pairs.shape[1], resolved.shape.vocab, mapping)
    return reader


def _end_token(place: Path) -> str | None:
    """The end-of-document token of a run or of a Hugging Face folder."""
    description = place / "model.json"
    named = json.loads(description.read_text())["eos"] if description.exists() else None
    return named or end_token(place)


@dataclass
class TeacherReader:
    """The predictions of a teacher with the student's tokenizer. `vocab` is the number of common tokens, `compared`
    that of the student's tokens over which distributions are compared."""

    objective: Distill
    resolved: ResolvedRun
    vocab: int
    compared: int

    @property
    def model(self) -> Decoder:
        return self.objective.models["teacher"]

    @property
    def width(self) -> int:
        """K: the rest must hold at least one token."""
        return min(self.objective.spec.top_k or 1, self.vocab - 1)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def check_coverage(self, rows: Ints, sections: list[Section], precision: str) -> float:
        return 1.0

    def chunks(self, rows: Ints, sections: list[Section]) -> Iterator[Ints]:
        """Rows of one section, as many as a micro-batch has."""
        for section in sections:
            own = rows[(rows >= section.first) & (rows < section.first + section.rows)]
            yield from (part for part in np.split(own, range(self.micro_rows, own.size, self.micro_rows)) if part.size)

    @property
    def micro_rows(self) -> int:
        return self.resolved.training.micro_rows

    def batch(self, numbers: Ints, sections: list[Section]) -> Batch:
        """Rows of one section, as the student reads them."""
        section = next(s for s in reversed(sections) if s.first <= numbers[0])
        held_out = self.resolved.held_out
        rows = self.resolved.rows[section.source] if section.split == TRAIN else held_out[section.source].rows
        block = rows.assemble(numbers - section.first)
        documents = np.zeros(block.tokens.shape, np.int32)
        repeat_into(block.spans.number.astype(np.int32), block.spans.length, documents.reshape(-1))
        weights = np.zeros(block.tokens.shape, np.float32)
        repeat_into((block.spans.document != PADDING).astype(np.float32), block.spans.length, weights.reshape(-1))
        if block.weights is not None:
            weights *= block.weights
        return Batch(block.tokens, block.targets, weights, documents, numbers, np.zeros_like(numbers), numbers)

    @torch.no_grad()
    def predict(self, numbers: Ints, sections: list[Section]) -> Predictions:
        batch = self.batch(numbers, sections)
        hidden_RTU = self.objective.other_hidden("teacher", self.objective.feed(batch, self.device))
        ids, log_p, _ = self.top(hidden_RTU.flatten(0, 1))
        shape = batch.tokens.shape
        return ids.reshape(*shape, -1), log_p.reshape(*shape, -1)

    def top(self, hidden_NU: Tensor) -> tuple[Ints, npt.NDArray[np.float32], float]:
        """The common tokens that are most likely by the student's ids, their log-probabilities and that of the rest;
        and the sum of the probability of all common tokens."""
        logits_of, parts, shared = self.objective.row_logits(self.model), [], 0.0
        spec = self.objective.spec
        for x_CU in hidden_NU.split(chunk_rows(2 * self.model.shape.vocab, hidden_NU.device)):
            log_p_CV = self.log_probabilities(logits_of(x_CU) / spec.temperature)
            top_CK = log_p_CV[:, : self.vocab].topk(self.width, dim=-1).indices
            parts.append((self.student_ids(top_CK), with_rest(log_p_CV, top_CK)))
            shared += float(log_p_CV[:, : self.vocab].exp().sum())
        ids, log_p = (torch.cat(some).cpu() for some in zip(*parts, strict=True))
        return ids.numpy(), log_p.float().numpy(), shared

    def log_probabilities(self, logits_CV: Tensor) -> Tensor:
        return logits_CV[:, : self.vocab].log_softmax(-1)

    def student_ids(self, top_CK: Tensor) -> Tensor:
        return top_CK


@dataclass
class MappedReader(TeacherReader):
    """The same for a teacher with another tokenizer. It reads the text of each document in a row; there is a prediction
    where both have read the same, over the tokens that both have and the rest."""

    mapping: TokenMap

    def check_coverage(self, rows: Ints, sections: list[Section], precision: str) -> float:
        """The covered share in a sample of the rows; refuses a teacher that covers little."""
        trained = covered = shared = 0.0
        for numbers in self.chunks(np.random.default_rng(0).permutation(rows)[:256], sections):
            batch = self.batch(numbers, sections)
            with compute_in(precision, self.device):
                at, hidden_NU = self._hidden(batch)
            counted = batch.weights > 0
            aligned = np.zeros(counted.shape, np.bool_)
            aligned.reshape(-1)[at] = True
            trained, covered = trained + counted.sum(), covered + (counted & aligned).sum()
            shared += self.top(hidden_NU)[2] / max(1, at.size) * (counted & aligned).sum()
            if trained >= SAMPLE_TOKENS:
                break
        share = float(shared / max(1.0, trained))
        if share < LEAST_COVERED:
            raise UserError(
                f"models.teacher: its tokenizer covers {share:.0%} of the trained tokens (its tokens end where the "
                f"run's do for {covered / max(1.0, trained):.0%}, {self.vocab:,} tokens are common), at least "
                f"{LEAST_COVERED:.0%} are needed: train on its answers instead (bessemer generate --write)"
            )
        return round(share, 4)

    @torch.no_grad()
    def predict(self, numbers: Ints, sections: list[Section]) -> Predictions:
        batch = self.batch(numbers, sections)
        at, hidden_NU = self._hidden(batch)
        ids, log_p, _ = self.top(hidden_NU)
        shape = batch.tokens.shape
        ids_RTK, log_p_RTK = np.zeros((*shape, ids.shape[1]), np.int64), np.full((*shape, log_p.shape[1]), np.nan)
        ids_RTK.reshape(-1, ids.shape[1])[at], log_p_RTK.reshape(-1, log_p.shape[1])[at] = ids, log_p
        return ids_RTK, log_p_RTK.astype(np.float32)

    @torch.no_grad()
    def _hidden(self, batch: Batch) -> tuple[Ints, Tensor]:
        """The cells of the batch, row by row, that have a prediction, and the teacher's hidden states for them."""
        T = batch.tokens.shape[1]
        rows: list[tuple[list[int], list[int]]] = []
        places: list[tuple[int, int, int]] = []
        for row in range(len(batch.tokens)):
            ids: list[int] = []
            documents: list[int] = []
            for number in np.unique(batch.documents[row]).tolist():
                columns = np.flatnonzero(batch.documents[row] == number)
                if not (batch.tokens[row, columns] | batch.targets[row, columns]).any():
                    continue  # padding
                text = self.mapping.align(batch.tokens[row, columns].tolist())
                places += [(row * T + c, row, len(ids) + i) for c, i in zip(columns, text.after, strict=True) if i >= 0]
                ids += text.ids
                documents += [number] * len(text.ids)
            rows.append((ids, documents))
        width = max(1, *(len(read) for read, _ in rows))
        tokens_RS, documents_RS = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), -1, np.int32)
        for row, (read, numbers) in enumerate(rows):
            tokens_RS[row, : len(read)], documents_RS[row, : len(read)] = read, numbers
        documents_RS[documents_RS < 0] = T
        mask = AttentionMask(torch.from_numpy(documents_RS).to(self.device))
        hidden_RSU = self.model(torch.from_numpy(tokens_RS).to(self.device), mask)
        at = np.array(places, np.int64).reshape(-1, 3)
        index = torch.from_numpy(at).to(self.device)
        return at[:, 0], hidden_RSU[index[:, 1], index[:, 2]]

    def log_probabilities(self, logits_CV: Tensor) -> Tensor:
        """The common tokens first, then the others."""
        common = torch.from_numpy(self.mapping.pairs[1]).to(logits_CV.device)
        others = torch.ones(logits_CV.shape[1], dtype=torch.bool, device=logits_CV.device)
        others[common] = False
        return torch.cat((logits_CV[:, common], logits_CV[:, others]), 1).log_softmax(-1)

    def student_ids(self, top_CK: Tensor) -> Tensor:
        return torch.from_numpy(self.mapping.pairs[0]).to(top_CK.device)[top_CK]


def _record(spec: RunSpec, resolved: ResolvedRun, store: TeacherStore) -> None:
    header, stored = store.header, int(store.stored.sum())
    size = human_bytes(stored * store.row_bytes)
    mapped = f"; another tokenizer, {header.covered:.0%} covered" if header.covered < 1 else ""
    value = f"{human_count(header.parameters)} parameters, fingerprint {header.weights}"
    reason = f"top {header.top_k} of {stored:,} rows in {store.folder} ({size}){mapped}; not in memory"
    resolved.plan.add("models.teacher", value, reason, "asked")
