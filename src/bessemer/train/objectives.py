"""Objectives rewrite a batch's rows: causal, prefix-LM, masked (BERT), infill (code), span denoising (T5, UL2), or a
mix of them, chosen for each row by its source and a hash of its position. Shapes: R rows, T columns.

Objectives are pure: draws are keyed by the seed and the row's position in the stream, so a step replays on any number
of ranks, and the next epoch, at other positions, draws again. No objective depends on weights, so a ban does not change
the draws of other documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.data.stream.batches import Batch
from bessemer.data.stream.order import Ints, Words, chain
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.model import ObjectiveSpec, count_spans
from bessemer.spec.shape import ModelShape

Flags = npt.NDArray[np.bool_]
PADDING = -1  # document number of padding, and origin of targets without weight


@dataclass
class ObjectiveBatch:
    """Documents are numbered as in the batch. Padding after a document shares its number if attention is causal, which
    never looks there, and has its own otherwise."""

    tokens: Ints  # (R, T) inputs; of the decoder if there is an encoder
    targets: Ints
    weights: npt.NDArray[np.float32]
    documents: npt.NDArray[np.int32]
    origin: Ints  # batch column of each target; PADDING if it has no weight
    prefix: Flags | None = None  # columns that all columns of their document can attend to
    causal: bool = True
    encoder_tokens: Ints | None = None  # (R, S); attended to by decoder columns of the same document
    encoder_documents: npt.NDArray[np.int32] | None = None
    in_place: bool = False  # targets are in the columns that they came from
    branches: npt.NDArray[np.int32] | None = (
        None  # parts of a document that do not attend to each other; 0: its beginning
    )
    read: Flags | None = None  # (R, T) columns that are not padding; None: those with a weight
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # in addition to the batch's

    @property
    def count(self) -> float:
        """The sum of the weights, which may differ from the batch's."""
        return float(self.weights.sum(dtype=np.float64))

    @property
    def single_document(self) -> bool:
        return not (self.documents != self.documents[:, :1]).any()


class Rewriting(Protocol):
    def rewrite(self, batch: Batch, /) -> ObjectiveBatch: ...


@dataclass(frozen=True)
class Pieces:
    """Runs of columns of one document each, row by row; padding is a run too."""

    row: Ints
    begin: Ints
    end: Ints
    real: Flags  # not padding
    number: Ints  # (R, T) run of each cell
    padding: Flags  # (R, T)


def pieces(batch: Batch) -> Pieces:
    # Padding has token and target 0 and no weight. The end of a document may look the same if it has no weight either;
    # losing these columns does no harm.
    empty = (batch.tokens == 0) & (batch.targets == 0) & (batch.weights == 0)
    padding = np.logical_and.accumulate(empty[:, ::-1], axis=1)[:, ::-1]
    begins = np.ones(padding.shape, np.bool_)
    begins[:, 1:] = (batch.documents[:, 1:] != batch.documents[:, :-1]) | (padding[:, 1:] != padding[:, :-1])
    row, begin = np.nonzero(begins)
    end = np.append(begin[1:], 0)
    end[end == 0] = padding.shape[1]
    return Pieces(row, begin, end, ~padding[row, begin], np.cumsum(begins).reshape(begins.shape) - 1, padding)


def count_read(batch: Batch | ObjectiveBatch, count: float) -> int:
    """The columns that are not padding, whatever their weights, which sum to `count`: what a step computes on."""
    if count == batch.tokens.size or (isinstance(batch, ObjectiveBatch) and batch.encoder_tokens is not None):
        return int(count)
    if isinstance(batch, ObjectiveBatch) and batch.read is not None:
        return int(batch.read.sum())
    empty = (batch.tokens == 0) & (batch.targets == 0) & (batch.weights == 0)
    return int(empty.size - np.logical_and.accumulate(empty[:, ::-1], axis=1).sum())


def row_keys(batch: Batch, seed: int, purpose: int) -> Words:
    """(R,) A key for each row; padding rows share one."""
    return chain(seed % 2**64, purpose, np.maximum(batch.positions, 0))


def happens(draws: Words, share: float) -> Flags:
    """True for this share of the draws, by their upper half."""
    return (draws >> np.uint64(32)) < round(share * 2**32)


def weights_of(batch: Batch, origin: Ints) -> npt.NDArray[np.float32]:
    """A target has the weight of the token that it came from."""
    weights = np.take_along_axis(batch.weights, np.maximum(origin, 0), axis=1)
    return np.where(origin == PADDING, np.float32(0), weights)


_PREFIX, _MASKED, _INFILL = 0x707265666978, 0x6D61736B6564, 0x696E66696C6C  # separate the uses of the seed
_HOW, _TOKEN = 1, 2  # further draws of a masked column
_WHETHER, _ORDER, _CUTS = 0, 1, slice(2, 4)  # the draws of a document for infill
_SHORTEST = 6  # tokens of a document for infill, without its end; shorter ones stay unchanged


@dataclass(frozen=True)
class Causal:
    def rewrite(self, batch: Batch) -> ObjectiveBatch:
        columns = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
        return ObjectiveBatch(batch.tokens, batch.targets, batch.weights, batch.documents, columns)


@dataclass(frozen=True)
class Prefix:
    """The first 1 to n - 1 of a document's n tokens are its prefix, uniformly drawn (as in T5), with the input before
    them. The last column of the prefix is the first that predicts."""

    seed: int

    def rewrite(self, batch: Batch) -> ObjectiveBatch:
        runs = pieces(batch)
        length = runs.end - runs.begin
        draws = chain(row_keys(batch, self.seed, _PREFIX)[runs.row], runs.begin)
        seen = np.where(length > 1, 2 + (draws % np.maximum(length - 1, 1).astype(np.uint64)).astype(np.int64), 1)
        columns = np.arange(batch.tokens.shape[1])
        left = (runs.begin + seen)[runs.number] - columns  # columns left of the prefix, including this one
        origin = np.where((left <= 1) & ~runs.padding, columns, PADDING)
        prefix = (left > 0) & ~runs.padding
        return ObjectiveBatch(batch.tokens, batch.targets, weights_of(batch, origin), batch.documents, origin, prefix)


@dataclass(frozen=True)
class Masked:
    """`rate` of the tokens are targets, at least one in a row, never a special one. Of these, `mask` become `mask_id`,
    `random` a random token that is not special, and the rest stay. Inputs are in the columns of their targets."""

    seed: int
    vocab: int
    mask_id: int
    special_ids: tuple[int, ...]  # including the end of a document
    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1

    def rewrite(self, batch: Batch) -> ObjectiveBatch:
        special, padding = [*self.special_ids, self.mask_id], pieces(batch).padding
        keys = row_keys(batch, self.seed, _MASKED)[:, None]
        columns = np.broadcast_to(np.arange(padding.shape[1]), padding.shape)
        draws, free = chain(keys, columns), ~padding & ~np.isin(batch.targets, special)
        chosen = free & happens(draws, self.rate)
        (without,) = np.nonzero(free.any(axis=1) & ~chosen.any(axis=1))
        chosen[without, np.where(free, draws, np.iinfo(np.uint64).max)[without].argmin(axis=1)] = True
        how = chain(np.broadcast_to(keys, chosen.shape)[chosen], columns[chosen], _HOW)
        ordinary = np.delete(np.arange(self.vocab), special)
        drawn = ordinary[(chain(how, _TOKEN) % np.uint64(max(1, ordinary.size))).astype(np.int64)]
        hidden, changed = happens(how, self.mask), happens(how, self.mask + self.random)
        tokens = batch.targets.copy()
        tokens[chosen] = np.where(hidden, self.mask_id, np.where(changed, drawn, tokens[chosen]))
        origin = np.where(chosen, columns, PADDING)
        documents = np.where(padding, np.int32(PADDING), batch.documents)
        return ObjectiveBatch(tokens, batch.targets, weights_of(batch, origin), documents, origin, causal=False)


@dataclass(frozen=True)
class Infill:
    """Fill-in-the-middle (Bavarian et al. 2022): `rate` of the documents are cut at two random tokens. They read PRE
    prefix SUF suffix MID middle or, for `suffix_first` of them, PRE SUF suffix MID prefix middle (PSM and SPM).

    A document keeps its columns: its last three tokens before the end are dropped, and the marks take over their
    origins and weights, so a row's sum of weights does not change. A document's part in a row counts as a document.
    """

    seed: int
    eos_id: int
    marks: tuple[int, int, int]  # ids of prefix, middle and suffix
    rate: float = 0.5
    suffix_first: float = 0.5

    def rewrite(self, batch: Batch) -> ObjectiveBatch:
        runs = pieces(batch)
        draws = chain(row_keys(batch, self.seed, _INFILL)[runs.row, None], runs.begin[:, None], np.arange(4))
        length = runs.end - runs.begin - (batch.targets[runs.row, runs.end - 1] == self.eos_id)
        chosen = runs.real & (length >= _SHORTEST) & happens(draws[:, _WHETHER], self.rate)
        suffix_first = happens(draws[:, _ORDER], self.suffix_first)
        tokens, targets = batch.tokens.copy(), batch.targets.copy()
        origin = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
        for k in np.flatnonzero(chosen).tolist():
            row, begin, stop, end = runs.row[k], runs.begin[k], runs.begin[k] + length[k], runs.end[k]
            visible, (pre, mid, suf) = np.arange(begin, stop - 3), np.arange(stop - 3, stop)[:, None]
            cuts = np.sort(draws[k, _CUTS] % np.uint64(visible.size + 1)).astype(np.int64)
            prefix, middle, suffix = np.split(visible, cuts)
            parts = (pre, suf, suffix, mid, prefix) if suffix_first[k] else (pre, prefix, suf, suffix, mid)
            origin[row, begin:stop] = order = np.concatenate([*parts, middle])
            targets[row, stop - 3 : stop] = self.marks
            targets[row, begin:stop] = targets[row, order]
            tokens[row, begin + 1 : end] = targets[row, begin : end - 1]
        return ObjectiveBatch(tokens, targets, weights_of(batch, origin), batch.documents, origin)


_DENOISE_PURPOSE = 0x64656E6F697365
_MULTIPLE = 64  # encoder and decoder widths: the longest row, rounded up so that few shapes occur


@dataclass(frozen=True)
class Denoise:
    """Span denoising (T5): `rate` of each document's tokens are in spans of `span` tokens on average. The input has a
    sentinel for each span, the target each sentinel with its span, and both end with EOS. As in T5's code, a document
    starts with a visible token and ends with a span, and sentinels start over in each document.

    This makes the text longer: a decoder-only model drops what no longer fits from the document's end (9 % at the
    defaults), an encoder-decoder at most one token. Documents under 3 tokens (6 for decoder-only) are left out.
    """

    seed: int
    eos_id: int
    sentinels: tuple[int, ...]
    context: int
    rate: float = 0.15
    span: float = 3.0
    encoder: bool = False  # otherwise the decoder reads the input too
    start_id: int = 0  # the decoder's first input; T5 uses padding

    def __post_init__(self) -> None:
        most = count_spans(self.context, self.rate, self.span)[1]
        if most > len(self.sentinels):
            have = f"has up to {most} spans, and there are {len(self.sentinels)} sentinels"
            fix = "name more in the objective's tokens, raise span or shorten data.context"
            raise UserError(f"denoise: a row of {self.context} tokens {have}: {fix}")

    def rewrite(self, batch: Batch) -> ObjectiveBatch:
        runs, (rows, columns) = pieces(batch), batch.tokens.shape
        draws = chain(row_keys(batch, self.seed, _DENOISE_PURPOSE)[:, None], np.arange(columns))
        encoder: list[list[Ints]] = [[] for _ in range(rows)]  # tokens and document numbers, document by document
        decoder: list[list[Ints]] = [[] for _ in range(rows)]  # tokens, targets, origins, document numbers, prefix
        sizes = runs.end - runs.begin - 1 if self.encoder else self._fitting[runs.end - runs.begin]
        for k in np.flatnonzero(runs.real & (sizes > 1)).tolist():
            row, begin, end, size = int(runs.row[k]), int(runs.begin[k]), int(runs.end[k]), int(sizes[k])
            hidden = noise_mask(size, self.rate, self.span, draws[row, begin : begin + size])
            inputs, targets, origin = self._corrupt(batch.targets[row, begin : begin + size], hidden)
            origin = np.append(begin + origin, end - 1)
            first, number, seen = self.start_id, batch.documents[row, begin], 0
            if self.encoder:
                encoder[row].append(np.stack([inputs, np.full(inputs.size, number)]))
            else:
                first, seen = batch.tokens[row, begin], inputs.size + 1
                origin = np.concatenate([np.full(inputs.size, PADDING), origin])
                targets = np.concatenate([inputs, targets])
            tokens, prefix = np.append(first, targets[:-1]), np.arange(targets.size) < seen
            decoder[row].append(np.stack([tokens, targets, origin, np.full(tokens.size, number), prefix]))
        width = None if self.encoder else columns
        tokens, targets, origin, numbers, prefix = _stack_rows(decoder, [0, 0, PADDING, PADDING, 0], width)
        # Padding gets the number of the last document, so that it has encoder columns to attend to.
        documents = np.maximum.accumulate(numbers, axis=1).astype(np.int32)
        rewritten = ObjectiveBatch(tokens, targets, weights_of(batch, origin), documents, origin)
        if self.encoder:
            rewritten.encoder_tokens, numbers = _stack_rows(encoder, [0, PADDING])
            rewritten.encoder_documents = numbers.astype(np.int32)
        else:
            rewritten.prefix = prefix.astype(np.bool_)
        return rewritten

    def _corrupt(self, text: Ints, hidden: Flags) -> tuple[Ints, Ints, Ints]:
        """(input, target, the text position of each target token without the end)."""
        begins = hidden & ~np.append(False, hidden[:-1])
        first, inside = np.flatnonzero(begins), np.flatnonzero(hidden)
        marks, before = np.array(self.sentinels[: first.size], np.int64), np.searchsorted(inside, first)
        inputs = text.copy()
        inputs[first] = marks
        inputs = np.append(inputs[~hidden | begins], self.eos_id)
        targets = np.append(np.insert(text[inside], before, marks), self.eos_id)
        return inputs, targets, np.insert(inside, before, first)

    @cached_property
    def _fitting(self) -> Ints:
        """For each number of columns, how many tokens fit with their input and target."""
        need = [size + 2 * count_spans(size, self.rate, self.span)[1] + 2 for size in range(2, self.context + 1)]
        return np.searchsorted(np.array(need), np.arange(self.context + 1), side="right") + 1


def _stack_rows(parts: list[list[Ints]], fill: list[int], width: int | None = None) -> Ints:
    """(fields, R, width): concatenates each row's documents of (fields, length) and pads with `fill`."""
    rows = [np.concatenate([np.empty((len(fill), 0), np.int64), *row], axis=1) for row in parts]
    width = width or -(-max(1, *(row.shape[1] for row in rows)) // _MULTIPLE) * _MULTIPLE
    stacked = np.tile(np.array(fill)[:, None, None], (1, len(rows), width))
    for k, row in enumerate(rows):
        stacked[:, k, : row.shape[1]] = row
    return stacked


def noise_mask(length: int, rate: float, span: float, draws: Words) -> Flags:
    """Which of at least two tokens are in spans: T5's random_spans_noise_mask, from one draw per token. The tokens in
    spans and the others are each cut at random into the same number of parts, which alternate."""
    noise, spans = count_spans(length, rate, span)
    hidden, visible = _cut(noise, spans, draws[: noise - 1]), _cut(length - noise, spans, draws[noise - 1 :])
    return np.repeat(np.tile([False, True], spans), np.stack([visible, hidden], axis=1).ravel())


def _cut(items: int, parts: int, draws: Words) -> Ints:
    """Lengths of parts of at least one item, uniformly over all cuts: the draws rank the gaps."""
    gaps = np.sort(np.argsort(draws[: items - 1], kind="stable")[: parts - 1])
    return np.diff(np.concatenate([[0], gaps + 1, [items]]))


_MIX_PURPOSE = 0x6D6978


@dataclass(frozen=True)
class Mix:
    """Chooses an objective for each row by the shares and sources of the specs. `names` are the sources of the batches'
    stream; a validation stream has its own, so it uses `replace(mix, names=...)`."""

    seed: int
    specs: tuple[ObjectiveSpec, ...]
    objectives: tuple[Rewriting, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in [name for name in self.names if not any(self._shares(name))]:
            raise UserError(f"no objective is left for source {name!r}: name it in one, or add one without sources")

    def rewrite(self, batch: Batch) -> ObjectiveBatch:
        """In a batch with causal rows, all columns of bidirectional rows are a prefix."""
        choice, shape = self._choose(batch), batch.tokens.shape
        kinds = (np.int64, np.int64, np.float32, np.int32, np.int64, np.bool_)
        mixed = ObjectiveBatch(*[np.empty(shape, kind) for kind in kinds])  # type: ignore[arg-type]
        for k in np.unique(choice).tolist():
            at = np.flatnonzero(choice == k)
            part = self.objectives[k].rewrite(batch.select(at))
            if part.prefix is None:
                part.prefix = np.full(part.tokens.shape, not part.causal)
            for name in ("tokens", "targets", "weights", "documents", "origin", "prefix"):
                getattr(mixed, name)[at] = getattr(part, name)
        return mixed

    def _choose(self, batch: Batch) -> Ints:
        """The index of each row's objective; padding rows get that of some source."""
        draws = row_keys(batch, self.seed, _MIX_PURPOSE) >> np.uint64(32)
        edges = np.array([np.cumsum(self._shares(name)) for name in self.names])
        edges = np.round(edges / edges[:, -1:] * 2**32)[np.maximum(batch.sources, 0)]
        return np.asarray((draws[:, None] >= edges).sum(axis=1))

    def _shares(self, name: str) -> list[float]:
        named = any(name in spec.sources for spec in self.specs)
        return [spec.share * (name in spec.sources if named else not spec.sources) for spec in self.specs]


def make_rewriting(
    specs: list[ObjectiveSpec], names: Sequence[str], seed: int, tokenizer: Tokenizer, model: ModelShape, context: int
) -> Rewriting:
    """The rewriting of the specs for that model. `names` are the stream's sources."""
    encoder, kinds = model.decoder_layers > 0, [spec.kind for spec in specs]
    only = "denoise" if encoder else "" if model.causal else "masked"  # with others the model would see its targets
    if only and (kinds != [only] or specs[0].sources):
        which = "with an encoder and a decoder" if encoder else "that sees both sides"
        raise UserError(f"a model {which} learns all sources by {only}, not by {', '.join(kinds)}: write kind: {only}")
    for name in sorted({name for spec in specs for name in spec.sources} - set(names)):
        raise UserError(f"an objective names the source {name!r}, but there are only {', '.join(names)}: correct it")
    objectives = tuple(_make(spec, seed, tokenizer, context, encoder) for spec in specs)
    return Mix(seed, tuple(specs), objectives, tuple(names)) if len(specs) > 1 or specs[0].sources else objectives[0]


def _make(spec: ObjectiveSpec, seed: int, tokenizer: Tokenizer, context: int, encoder: bool) -> Rewriting:
    names, settings, eos_id = spec.special_tokens(context), spec.settings(), tokenizer.eos_id
    for name in [name for name in names if name not in tokenizer.special]:
        fix = "add it to tokenizer.special, or name others in the objective's tokens"
        raise UserError(f"{spec.kind} needs the special token {name!r}, which the tokenizer has not: {fix}")
    ids = tuple(tokenizer.special[name] for name in names)
    if spec.kind == "masked":
        return Masked(seed, tokenizer.vocab_size, ids[0], tuple(tokenizer.special.values()), **settings)
    if spec.kind == "denoise":
        return Denoise(seed, eos_id, ids, context, settings["rate"], settings["span"], encoder)
    if spec.kind == "infill":
        return Infill(seed, eos_id, (ids[0], ids[1], ids[2]), **settings)
    return Prefix(seed) if spec.kind == "prefix" else Causal()
