"""Compares a document with others of its source: the evidence that a conviction needs.

A single row of a good document may have any loss: a table, a ruled line, names in another script. So the whole document
is measured (its part in the step, and rows spread over its length) next to other documents of its source. It is far
from them if its loss is, and if the model is clearly worse on it than a unigram model of the source and of the document
so far, in nearly all pieces of it. Good documents with odd passages have other passages that the model predicts well.

Suspect steps are examined by forward passes inside the loop; nothing changes unless a document is convicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.train.engine import Engine
from bessemer.train.job import Job
from bessemer.train.step import StepResult
from bessemer.trial.attribute import DocumentPart, describe_accused, document_parts
from bessemer.trial.case import Experiment, Trial
from bessemer.trial.measure import gather_rows, global_batches, token_losses

REFERENCES, LEAST_REFERENCES = 48, 12  # documents to compare with
MOST_TOKENS = 512  # of a document, or one row if that is longer
LEAST_TOKENS = 64  # fewer are not enough to compare
# Limits: robust deviations of the loss; the model's gain over the unigram model, as a share of its gain on other
# documents; the share of pieces in which the unigram model is better. Of 2,864 good pages ten were beyond 3 deviations;
# in 150 runs such pages had gains down to -0.6, and the unigram model was better in at most 88 % of their pieces.
# Rot13, reversed text, base64, mojibake, noise and other languages had 3 to 19 deviations, gains of -0.25 and below,
# and the unigram model was better in all pieces.
FAR, LOST, THROUGHOUT = 3.0, -0.25, 0.9
PIECE = 128  # tokens
PRIOR = 256  # tokens after which the document's own frequencies weigh as much as the source's
FLOOR = 0.05  # smallest scale, as a share of the median loss
CANDIDATES = 4  # documents of a suspect step

TokenLosses = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # a document's tokens and their losses


@dataclass(frozen=True)
class Deviation:
    """A document's mean loss next to those of others of its source, at the same weights."""

    loss: float
    tokens: int
    guess: float  # loss of the unigram model
    usual: float  # median loss of the others
    scale: float
    usual_gain: float  # of the model over the unigram model on the others
    worse: float  # share of pieces in which the unigram model is better
    others: int

    @property
    def sigmas(self) -> float:
        return (self.loss - self.usual) / self.scale

    @property
    def is_far(self) -> bool:
        gain = self.guess - self.loss
        return self.sigmas > FAR and gain < LOST * self.usual_gain and self.worse >= THROUGHOUT

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3g} over {self.tokens} of its tokens, {self.sigmas:.1f} deviations from the "
            f"{self.usual:.3g} of {self.others} other documents; a guess by frequency alone has {self.guess:.3g}, "
            f"and is better in {self.worse:.0%} of it"
        )


def compare_document(document: TokenLosses, others: Sequence[TokenLosses], vocab: int) -> Deviation | None:
    """Compare a document with others over the same number of tokens; None with too few tokens or documents."""
    ids, losses = document
    size = losses.size
    if size < LEAST_TOKENS:
        return None
    references = [(tokens[:size], other[:size]) for tokens, other in others if other.size >= LEAST_TOKENS]
    if len(references) < LEAST_REFERENCES:
        return None
    counts = np.bincount(np.concatenate([tokens for tokens, _ in others]), minlength=vocab) + 0.5
    frequency = counts / counts.sum()
    means = np.array([other.mean() for _, other in references])
    usual = float(np.median(means))
    above = np.sort(means - usual)
    upper = above[int(0.95 * (above.size - 1))] / 1.645  # as in guard/judge.py: a median misses heavy tails
    scale = max(1.4826 * float(np.median(np.abs(above))), float(upper), FLOOR * usual)
    gain = float(np.median([(unigram_losses(tokens, frequency) - other).mean() for tokens, other in references]))
    guess = unigram_losses(ids, frequency)
    pieces = np.array_split(guess - losses, max(1, size // PIECE))
    worse = float(np.mean([piece.mean() < 0 for piece in pieces]))
    return Deviation(float(losses.mean()), size, float(guess.mean()), usual, scale, max(0.0, gain), worse, means.size)


def unigram_losses(tokens: npt.NDArray[np.int64], frequency: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Losses of a unigram model from the source's frequencies and, increasingly, those of the document so far."""
    order = np.argsort(tokens, kind="stable")
    ordered = tokens[order]
    seen = np.empty(tokens.size)  # earlier occurrences of each token
    seen[order] = np.arange(tokens.size) - np.searchsorted(ordered, ordered)
    return -np.log((PRIOR * frequency[tokens] + seen) / (PRIOR + np.arange(tokens.size)))


def examine_parts(
    engine: Engine, stream: BatchStream | IterableStream, parts: Sequence[DocumentPart], step: int
) -> list[Deviation | None]:
    """The deviation of each document from others of its source; None if it cannot be read or compared."""
    if not isinstance(stream, BatchStream):
        return [None] * len(parts)
    left_out = set(stream.banned) | {(part.source, part.origin.document) for part in parts}
    result: dict[int, Deviation | None] = {}
    for source in dict.fromkeys(part.source for part in parts):
        own = [part for part in parts if part.source == source and _store(stream, part) is not None]
        if own:
            others = [d for d in _reference_documents(stream, own[0], step) if (source, d) not in left_out][:REFERENCES]
            read = _document_losses(engine, stream, own[0], [*(part.origin.document for part in own), *others])
            for part, document_losses in zip(own, read, strict=False):
                result[id(part)] = compare_document(
                    _with_step(part, document_losses), read[len(own) :], engine.model.shape.vocab
                )
    return [result.get(id(part)) for part in parts]


def _with_step(part: DocumentPart, document_losses: TokenLosses) -> TokenLosses:
    """The document's part in the step followed by the rest of it, each cut to MOST_TOKENS."""
    ids, losses = np.array(part.counted_ids[:MOST_TOKENS], np.int64), np.array(part.losses[:MOST_TOKENS])
    return np.concatenate((ids, document_losses[0])), np.concatenate((losses, document_losses[1]))


def _reference_documents(stream: BatchStream, part: DocumentPart, step: int) -> list[int]:
    """Random documents of the part's source; those of recent steps if others would have to be downloaded."""
    if getattr(stream.sources[part.source], "far", False):
        shares = [share for before in range(max(0, step - 16), step) for share in stream.origins(before)]
        return list(dict.fromkeys(share.document for share in shares if share.source == part.source))
    draw = np.random.default_rng(step).integers(_store(stream, part).documents, size=4 * REFERENCES)
    return list(dict.fromkeys(draw.tolist()))


def _store(stream: BatchStream, part: DocumentPart) -> Any:
    """The token store of the part's source, if it holds the document as it was trained on."""
    if any(transform.identity for transform in stream.transforms):
        return None
    store = getattr(stream.sources[part.source], "store", None)
    return store if store is not None and part.origin.document < store.documents else None


def _document_losses(
    engine: Engine, stream: BatchStream, part: DocumentPart, documents: Sequence[int]
) -> list[TokenLosses]:
    """Tokens and losses of documents: all of them, or rows spread over their length."""
    store, length, source = _store(stream, part), stream.sequence_length, stream.names.index(part.source)
    starts, stops = store.extents(np.array(documents, np.int64))
    pieces = [  # document, its first target, targets
        (k, int(start), int(min(length, stop - start)))
        for k, (first, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True))
        for start in _row_starts(first, stop, length)
    ]
    micro_rows = engine.plan.micro_rows
    rows = -(-len(pieces) // micro_rows) * micro_rows
    tokens, targets = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
    weights = np.zeros((rows, length), np.float32)
    for row, (_, start, size) in enumerate(pieces):
        ids = store.gather(np.array([max(0, start - 1)]), size + (start > 0))[0].astype(np.int64)
        targets[row, :size] = ids[-size:]
        tokens[row, 1:size] = targets[row, : size - 1]
        tokens[row, 0] = ids[0] if start else store.gather(np.array([store.tokens - 1]), 1)[0, 0]
        mask = store.weights(np.array([start]), size) if store.masked else None
        weights[row, :size] = 1.0 if mask is None else mask[0]
    numbers = np.arange(rows, dtype=np.int64)
    batch = Batch(tokens, targets, weights, np.zeros((rows, length), np.int32), numbers, np.full(rows, source), numbers)
    batches = [batch.part(row, row + micro_rows) for row in range(0, rows, micro_rows)]
    nll = np.concatenate(token_losses(engine, batches))
    of = np.repeat(np.array([*(k for k, _, _ in pieces), *[-1] * (rows - len(pieces))]), length).reshape(rows, length)
    chosen = [(of == k) & (weights > 0) for k in range(len(documents))]
    return [(targets[mask], nll[mask]) for mask in chosen]


def _row_starts(first: int, stop: int, length: int) -> list[int]:
    """Where rows of a document start: all of them, or as many as MOST_TOKENS allows, evenly spaced."""
    most = max(1, MOST_TOKENS // length)
    rows = max(1, (stop - first) // length)  # a short last row is left out
    return [first + length * (k * rows // min(rows, most)) for k in range(min(rows, most))]


def examine_step(
    job: Job, result: StepResult, usual: float, decode: Callable[[list[int]], str] | None = None
) -> tuple[Trial | None, list[str]]:
    """Examine the documents of an accepted but suspect step: a trial if one of them is convicted, and a line for each
    examined document. `usual` is the expected loss. All ranks call it."""
    began, step = time.monotonic(), result.step
    engine, stream = job.engine, job.data.stream
    batches = result.batches if job.world.size == 1 else global_batches(engine, stream, step)
    parts = document_parts(stream, batches, gather_rows(engine, result.losses.token_losses))
    candidates = sorted(parts, key=lambda part: usual * part.tokens - part.loss)[:CANDIDATES]
    candidates = [part for part in candidates if part.loss > usual * part.tokens]
    examined = list(zip(candidates, examine_parts(engine, stream, candidates, step), strict=True))
    lines = [
        f"{part.origin.file}:{part.origin.row}: {deviation or 'cannot be compared'}" for part, deviation in examined
    ]
    guilty = [part for part, deviation in examined if deviation and deviation.is_far]
    if not guilty:
        return None, lines
    loss, tokens = sum(part.loss for part in parts), sum(part.tokens for part in parts)
    rest = (loss - sum(part.loss for part in guilty)) / max(1, tokens - sum(part.tokens for part in guilty))
    experiments = [document_experiment(part, deviation) for part, deviation in examined if deviation]
    question = "Is the loss of the step lower without the accused?"
    experiments.append(Experiment("without the accused", question, rest, None, rest < loss / tokens))
    least = min(deviation.sigmas for _, deviation in examined if deviation and deviation.is_far)
    trial = Trial(
        verdict="data", confidence=round(1 - 0.4 * FAR / least, 3), state_healthy=True,
        reason=f"the step's loss is {loss / tokens:.3g} with the accused documents and {rest:.3g} without",
        accused=describe_accused(candidates, guilty, loss, {}, decode), experiments=experiments,
        seconds=job.world.agree(round(time.monotonic() - began, 3)),
    )  # fmt: skip
    return trial, lines


def document_experiment(part: DocumentPart, deviation: Deviation) -> Experiment:
    question = f"Is {part.origin.file}:{part.origin.row} as a whole like others of its source?"
    return Experiment("whole document", question, deviation.loss, None, not deviation.is_far, str(deviation))
