"""Is a document far from the others of its source? The proof of harm that a conviction needs.

One row of an honest page may have any loss: a table, a ruled line, names in another script. So the whole document is
measured, what of it is in the step and rows spread over its length, beside others of its source. It is far from them if
its loss is, and if the model does clearly worse on it than a guess that only counts tokens, in the source and in the
document so far, all the way through: what was learnt from the rest is wrong there. Honest pages with odd passages have
others on which the model does well. What the text looks like is no part of it.

Suspect steps are examined in the loop, by forward passes alone: nothing of the run changes unless a document is
convicted.
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
from bessemer.trial.attribute import DocumentPart, accuse, parts_of
from bessemer.trial.case import Experiment, Trial
from bessemer.trial.measure import gather_rows, global_batches, token_losses

REFERENCES = 48  # documents that one is compared with, and the fewest
FEWEST = 12
MOST_TOKENS = 512  # of a document, or one row where that is longer
LEAST_TOKENS = 64  # fewer say nothing of a document
# Robust deviations of the loss; what the model gains on the guess, as a share of what it gains on other documents; and
# the share of the document's pieces in which it loses. Of 2,864 honest pages ten were beyond 3 deviations; in 150 runs,
# where what a step holds of a page counts too, such pages had gains down to -0.6, and the model lost in at most 88 % of
# their pieces. Rot13, reversed text, base64, mojibake, noise and other languages were at 3 to 19 deviations, gains of
# -0.25 and below, and the model lost in all of their pieces.
FAR, LOST, THROUGHOUT = 3.0, -0.25, 0.9
PIECE = 128  # tokens
PRIOR = 256  # tokens: how much of the document it takes for its own frequencies to weigh as much as its source's
FLOOR = 0.05  # smallest scale, as a share of the usual loss
CANDIDATES = 4  # documents of a suspect step

Read = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # a document's tokens and their losses


@dataclass(frozen=True)
class Deviation:
    """A document's mean loss beside those of others of its source, at the same weights."""

    loss: float
    tokens: int
    guess: float  # the loss of a guess by the frequencies of tokens
    usual: float  # median of the others
    scale: float
    usual_gain: float  # of the others on such a guess
    worse: float  # share of the document's pieces on which the guess is better
    others: int

    @property
    def away(self) -> float:
        return (self.loss - self.usual) / self.scale

    @property
    def far(self) -> bool:
        gain = self.guess - self.loss
        return self.away > FAR and gain < LOST * self.usual_gain and self.worse >= THROUGHOUT

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3g} over {self.tokens} of its tokens, {self.away:.1f} deviations from the "
            f"{self.usual:.3g} of {self.others} other documents; a guess by frequency alone has {self.guess:.3g}, "
            f"and is better in {self.worse:.0%} of it"
        )


def deviation(document: Read, others: Sequence[Read], vocab: int) -> Deviation | None:
    """Of a document from others, each over as many tokens; None where too little is known."""
    ids, losses = document
    size = losses.size
    if size < LEAST_TOKENS:
        return None
    known = [(tokens[:size], other[:size]) for tokens, other in others if other.size >= LEAST_TOKENS]
    if len(known) < FEWEST:
        return None
    counts = np.bincount(np.concatenate([tokens for tokens, _ in others]), minlength=vocab) + 0.5
    frequency = counts / counts.sum()
    means = np.array([other.mean() for _, other in known])
    usual = float(np.median(means))
    above = np.sort(means - usual)
    upper = above[int(0.95 * (above.size - 1))] / 1.645  # as the judge has it: a median does not see heavy tails
    scale = max(1.4826 * float(np.median(np.abs(above))), float(upper), FLOOR * usual)
    gain = float(np.median([(guess_losses(tokens, frequency) - other).mean() for tokens, other in known]))
    guess = guess_losses(ids, frequency)
    pieces = np.array_split(guess - losses, max(1, size // PIECE))
    worse = float(np.mean([piece.mean() < 0 for piece in pieces]))
    return Deviation(float(losses.mean()), size, float(guess.mean()), usual, scale, max(0.0, gain), worse, means.size)


def guess_losses(tokens: npt.NDArray[np.int64], frequency: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The losses of a guess by the tokens' frequency in the source and, as it goes on, in the document itself."""
    order = np.argsort(tokens, kind="stable")
    ordered = tokens[order]
    seen = np.empty(tokens.size)  # how often each token came before
    seen[order] = np.arange(tokens.size) - np.searchsorted(ordered, ordered)
    return -np.log((PRIOR * frequency[tokens] + seen) / (PRIOR + np.arange(tokens.size)))


def examine_parts(
    engine: Engine, stream: BatchStream | IterableStream, parts: Sequence[DocumentPart], step: int
) -> list[Deviation | None]:
    """How far each document is from others of its source; None where it cannot be read as a whole, or by too few."""
    if not isinstance(stream, BatchStream):
        return [None] * len(parts)
    left_out = set(stream.banned) | {(part.source, part.origin.document) for part in parts}
    result: dict[int, Deviation | None] = {}
    for source in dict.fromkeys(part.source for part in parts):
        own = [part for part in parts if part.source == source and _store(stream, part) is not None]
        if own:
            others = [d for d in _drawn(stream, own[0], step) if (source, d) not in left_out][:REFERENCES]
            read = _read(engine, stream, own[0], [*(part.origin.document for part in own), *others])
            for part, whole in zip(own, read, strict=False):
                result[id(part)] = deviation(_with_step(part, whole), read[len(own) :], engine.model.shape.vocab)
    return [result.get(id(part)) for part in parts]


def _with_step(part: DocumentPart, whole: Read) -> Read:
    """A document as it was in the step, at the weights that judged it, and as a whole: at most as much of either."""
    ids, losses = np.array(part.learnt[:MOST_TOKENS], np.int64), np.array(part.losses[:MOST_TOKENS])
    return np.concatenate((ids, whole[0])), np.concatenate((losses, whole[1]))


def _drawn(stream: BatchStream, part: DocumentPart, step: int) -> list[int]:
    """Documents of the part's source: any, or of the steps before where reading others would fetch their shards."""
    if getattr(stream.sources[part.source], "far", False):
        shares = [share for before in range(max(0, step - 16), step) for share in stream.origins(before)]
        return list(dict.fromkeys(share.document for share in shares if share.source == part.source))
    draw = np.random.default_rng(step).integers(_store(stream, part).documents, size=4 * REFERENCES)
    return list(dict.fromkeys(draw.tolist()))


def _store(stream: BatchStream, part: DocumentPart) -> Any:
    """The tokens of the part's source, if its document is among them and trained on as it lies there."""
    if any(transform.identity for transform in stream.transforms):
        return None
    store = getattr(stream.sources[part.source], "store", None)
    return store if store is not None and part.origin.document < store.documents else None


def _read(engine: Engine, stream: BatchStream, part: DocumentPart, documents: Sequence[int]) -> list[Read]:
    """Documents of the part's source and their losses: all of their tokens, or rows spread over their length."""
    store, length, source = _store(stream, part), stream.sequence_length, stream.names.index(part.source)
    starts, stops = store.extents(np.array(documents, np.int64))
    pieces = [  # document, its first target, targets
        (k, int(start), int(min(length, stop - start)))
        for k, (first, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True))
        for start in _spread(first, stop, length)
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
        kept = store.weights(np.array([start]), size) if store.masked else None
        weights[row, :size] = 1.0 if kept is None else kept[0]
    numbers = np.arange(rows, dtype=np.int64)
    whole = Batch(tokens, targets, weights, np.zeros((rows, length), np.int32), numbers, np.full(rows, source), numbers)
    batches = [whole.part(row, row + micro_rows) for row in range(0, rows, micro_rows)]
    nll = np.concatenate(token_losses(engine, batches))
    of = np.repeat(np.array([*(k for k, _, _ in pieces), *[-1] * (rows - len(pieces))]), length).reshape(rows, length)
    chosen = [(of == k) & (weights > 0) for k in range(len(documents))]
    return [(targets[mask], nll[mask]) for mask in chosen]


def _spread(first: int, stop: int, length: int) -> list[int]:
    """Where rows of a document begin: all of them, or evenly over its length as many as MOST_TOKENS allow."""
    most = max(1, MOST_TOKENS // length)
    rows = max(1, (stop - first) // length)  # a short rest behind them is left out
    return [first + length * (k * rows // min(rows, most)) for k in range(min(rows, most))]


def examine_step(
    job: Job, result: StepResult, usual: float, decode: Callable[[list[int]], str] | None = None
) -> tuple[Trial | None, list[str]]:
    """The trial of a step that was accepted and is suspect, None if no document of it is convicted; and what was seen
    of each that was examined. `usual` is the loss that was to be expected. All processes call it."""
    began, step = time.monotonic(), result.step
    engine, stream = job.engine, job.data.stream
    batches = result.batches if job.world.size == 1 else global_batches(engine, stream, step)
    parts = parts_of(stream, batches, gather_rows(engine, result.losses.token_losses))
    candidates = sorted(parts, key=lambda part: usual * part.tokens - part.loss)[:CANDIDATES]
    candidates = [part for part in candidates if part.loss > usual * part.tokens]
    found = list(zip(candidates, examine_parts(engine, stream, candidates, step), strict=True))
    seen = [f"{part.origin.file}:{part.origin.row}: {away or 'cannot be compared'}" for part, away in found]
    guilty = [part for part, away in found if away and away.far]
    if not guilty:
        return None, seen
    loss, tokens = sum(part.loss for part in parts), sum(part.tokens for part in parts)
    rest = (loss - sum(part.loss for part in guilty)) / max(1, tokens - sum(part.tokens for part in guilty))
    experiments = [whole_document(part, away) for part, away in found if away]
    question = "Is the loss of the step lower without the accused?"
    experiments.append(Experiment("without the accused", question, rest, None, rest < loss / tokens))
    least = min(away.away for _, away in found if away and away.far)
    trial = Trial(
        verdict="data", confidence=round(1 - 0.4 * FAR / least, 3), state_healthy=True,
        reason=f"the step's loss is {loss / tokens:.3g} with the accused documents and {rest:.3g} without",
        accused=accuse(candidates, guilty, loss, {}, decode), experiments=experiments,
        seconds=job.world.agree(round(time.monotonic() - began, 3)),
    )  # fmt: skip
    return trial, seen


def whole_document(part: DocumentPart, away: Deviation) -> Experiment:
    question = f"Is {part.origin.file}:{part.origin.row} as a whole like others of its source?"
    return Experiment("whole document", question, away.loss, None, not away.far, str(away))
