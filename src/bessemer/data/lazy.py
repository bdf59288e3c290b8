"""Rows that are tokenized when they are read, for a user who will not prepare a corpus.

Row i is a fixed block of the source's text, so the promise of a pure stream holds: bytes [i*B, (i+1)*B) of the
documents laid end to end, moved on to the next white space. B is chosen so that nearly every block fills a row: what a
block has more is cut off, what it lacks is padding, and the plan says how much of both there is.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bessemer.data.curate.ledger import text_hash
from bessemer.data.lazy_index import Index
from bessemer.data.store.token_store import Origin
from bessemer.data.stream.rows import PADDING, Ints, RowBlock, Spans
from bessemer.errors import UserError
from bessemer.spec.quantity import human_bytes

_FORMAT = 1  # raise it when the same texts give other rows
_PLACE = re.compile(rb"(?<=\S)\s")  # before white space: a token holds the space before its word
_PLACE_BYTES = 64  # how far a cut moves to find one
# Share of the blocks that fill their rows. On 31 MB of Python in rows of 2,048: 0.5 cuts off 11 % of the text and pads
# 4.8 % of the columns, 0.75 cuts 16 % and pads 1.6 %, 0.9 cuts 21 % and pads 0.4 %.
_FILL = 0.75
_TRIALS = 64  # blocks that B is chosen from
_TRIAL_BYTES_PER_TOKEN = 4
_TEXT_KEPT_BYTES = 64 << 20  # of stretches read lately
_STRETCH_KEPT_BYTES = 4 << 20  # longer ones are read to the documents wanted and not kept
_LONG_SEEK_BYTES = 4 << 20  # what one row should not cost to read
_TOKENS_KEPT = 8 << 20  # of rows tokenized lately


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    eos_id: int

    @property
    def fingerprint(self) -> str: ...
    def encode_batch(
        self, texts: Sequence[str], continues: Sequence[bool] | None = None, /
    ) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True)
class Cut:
    """A part of one document's text: whether the document begins and whether it ends here."""

    document: int
    text: str
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Tokens:
    """A block, tokenized: ids with the end of each document, and the document that each came from."""

    ids: Ints
    documents: Ints


@dataclass(frozen=True)
class Chosen:
    """The size of a block, and what it costs: shares of the text's tokens cut off and of the columns padded."""

    block_bytes: int
    bytes_per_token: float
    cut_share: float
    padding_share: float


class _Texts:
    """Reads documents through the index; stretches of usual size are kept for their neighbours."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._kept: OrderedDict[int, list[bytes]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def blocks(self, starts: Ints, stops: Ints) -> list[list[Cut]]:
        """The text of each range of bytes, document by document."""
        ends = self.index.ends
        # A cut may move past the range's end: the document that holds its last byte decides how far.
        first, last = np.searchsorted(ends, starts, "right"), np.searchsorted(ends, stops - 1, "right")
        wanted = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]))
        texts = self._read(wanted)
        found = []
        for start, stop, a, b in zip(*(x.tolist() for x in (starts, stops, first, last)), strict=True):
            cuts = []
            for document in range(a, b + 1):
                data = texts[document]
                begin = int(ends[document]) - len(data) - 1
                left, right = _snap(data, start - begin), _snap(data, stop - begin)
                complete = stop - begin > len(data)
                if right > left or complete:
                    cuts.append(Cut(document, data[left:right].decode(), start <= begin, complete))
            found.append(cuts)
        return found

    def _read(self, documents: Ints) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        stretches = self.index.stretch_of(documents)
        for stretch in np.unique(stretches).tolist():
            mine = documents[stretches == stretch]
            ordinals = self.index.ordinal[mine].tolist()
            texts = self._stretch(stretch, set(ordinals))
            found |= {int(document): texts[ordinal] for document, ordinal in zip(mine, ordinals, strict=True)}
        return found

    def _stretch(self, stretch: int, wanted: set[int]) -> dict[int, bytes]:
        with self._lock:
            if stretch in self._kept:
                self._kept.move_to_end(stretch)
                return dict(enumerate(self._kept[stretch]))
        keep = self.index.stretches["text"][stretch] <= _STRETCH_KEPT_BYTES
        last, found = max(wanted), {}
        for ordinal, document in enumerate(self.index.read(stretch)):
            if keep or ordinal in wanted:
                found[ordinal] = document.text.encode()
            if not keep and ordinal == last:
                break
        if keep:
            with self._lock:
                if stretch not in self._kept:
                    self._kept[stretch] = list(found.values())
                    self._kept_bytes += sum(map(len, found.values()))
                while self._kept_bytes > _TEXT_KEPT_BYTES:
                    self._kept_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))
        return found


def _snap(data: bytes, at: int) -> int:
    """Where a cut at this byte falls: at the next white space if it is near, else between two characters."""
    if at <= 0:
        return 0
    if at >= len(data):
        return len(data)
    place = _PLACE.search(data, at, at + _PLACE_BYTES)
    if place:
        return place.start()
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def _tokenize(blocks: Sequence[Sequence[Cut]], tokenizer: Encoder) -> list[Tokens]:
    """Each block's ids. A document that begins with the block has an end of document before it, as any other has."""
    cuts = [cut for block in blocks for cut in block]
    encoded = iter(tokenizer.encode_batch([cut.text for cut in cuts], [not cut.begins for cut in cuts]))
    eos, found = np.array([tokenizer.eos_id], np.int64), []
    for block in blocks:
        ids, owners = [], []
        for k, cut in enumerate(block):
            mine = np.asarray(next(encoded), np.int64)
            parts = [eos] if k == 0 and cut.begins else []
            parts += [mine, eos] if cut.ends else [mine]
            ids += parts
            owners.append(np.full(sum(part.size for part in parts), cut.document))
        found.append(Tokens(np.concatenate([*ids, eos[:0]]), np.concatenate([*owners, eos[:0]])))
    return found


def choose_block(index: Index, tokenizer: Encoder, length: int, fill: float = _FILL) -> Chosen:
    """The size of a block for rows of `length`: measured on 64 blocks spread over the source, so that a share of `fill`
    of them fill their rows."""
    if not index.documents:
        raise UserError(f"source {index.name!r} holds no text: correct its path or text_field, or remove it")
    texts = _Texts(index)
    trial = min(index.bytes, _TRIAL_BYTES_PER_TOKEN * length)

    def tokens(size: int) -> Ints:
        starts = np.unique(np.linspace(0, max(0, index.bytes - size), _TRIALS).astype(np.int64))
        blocks = texts.blocks(starts, np.minimum(starts + size, index.bytes))
        return np.array([max(1, found.ids.size) for found in _tokenize(blocks, tokenizer)])

    per_token = np.sort(trial / tokens(trial))
    needed = float(per_token[min(per_token.size - 1, math.ceil(fill * per_token.size) - 1)])
    size = max(1, math.ceil(needed * (length + 1)))
    found = tokens(min(size, index.bytes)) - 1  # the first id is only an input
    return Chosen(
        block_bytes=size,
        bytes_per_token=float(min(size, index.bytes) * found.size / (found + 1).sum()),
        cut_share=float(np.maximum(found - length, 0).sum() / found.sum()) if found.sum() else 0.0,
        padding_share=float(np.maximum(length - found, 0).mean() / length),
    )


class LazyRows:
    """The rows of a source that was only indexed. Any row costs one seek in one file, one stretch read and B bytes
    tokenized; rows read lately are kept. Safe for several threads."""

    full = False

    def __init__(self, index: Index, tokenizer: Encoder, length: int, block_bytes: int) -> None:
        self.index, self.tokenizer, self.length, self.block_bytes = index, tokenizer, length, block_bytes
        self.count = -(-index.bytes // block_bytes)
        self.packing = f"lazy {_FORMAT}, {block_bytes} bytes"
        self.fingerprint = f"{index.fingerprint}-{tokenizer.fingerprint}"
        self._texts = _Texts(index)
        self._kept: OrderedDict[int, Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def spans(self, sequences: Ints) -> Spans:
        """Tokenizes the rows, unless they were read lately."""
        return self._spans(self._rows(sequences))

    def assemble(self, sequences: Ints) -> RowBlock:
        rows = self._rows(sequences)
        shape = sequences.size, self.length
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for r, row in enumerate(rows):
            size = max(0, row.ids.size - 1)
            tokens[r, :size], targets[r, :size] = row.ids[:-1][:size], row.ids[1:]
        return RowBlock(tokens, targets, None, self._spans(rows))

    def origin_of_document(self, document: int) -> Origin:
        """Reads the document's stretch. `start` and `stop` count bytes of text."""
        stretch = int(self.index.stretch_of(np.array([document]))[0])
        ordinal = int(self.index.ordinal[document])
        for k, found in enumerate(self.index.read(stretch)):
            if k == ordinal:
                stop = int(self.index.ends[document])
                start = int(self.index.ends[document - 1]) if document else 0
                name = found.id or f"{text_hash(found.text, 0):016x}"
                return Origin(found.file, found.row, name, document, start, stop)
        raise IndexError(f"document {document}, but {self.index.documents} in all")

    def _spans(self, rows: Sequence[Tokens]) -> Spans:
        owners = np.full((len(rows), self.length), PADDING)
        for r, row in enumerate(rows):
            owners[r, : max(0, row.ids.size - 1)] = row.documents[1:]
        begins = np.ones(owners.shape, np.bool_)
        begins[:, 1:] = owners[:, 1:] != owners[:, :-1]
        cells = np.flatnonzero(begins.ravel())
        document = owners.ravel()[cells]
        length = np.diff(cells, append=owners.size)
        weight = np.where(document == PADDING, 0, length)
        return Spans(cells // self.length, cells % self.length, length, document, weight)

    def _rows(self, sequences: Ints) -> list[Tokens]:
        """The first T + 1 ids of each row's block."""
        with self._lock:
            found = {k: self._kept[k] for k in sequences.tolist() if k in self._kept}
        missing = np.array([k for k in dict.fromkeys(sequences.tolist()) if k not in found], np.int64)
        if missing.size:
            starts = missing * self.block_bytes
            blocks = self._texts.blocks(starts, np.minimum(starts + self.block_bytes, self.index.bytes))
            for k, row in zip(missing.tolist(), _tokenize(blocks, self.tokenizer), strict=True):
                found[k] = Tokens(row.ids[: self.length + 1], row.documents[: self.length + 1])
        with self._lock:
            for k, row in found.items():
                self._kept[k] = row
                self._kept.move_to_end(k)
            while len(self._kept) > max(1, _TOKENS_KEPT // self.length):
                self._kept.popitem(last=False)
        return [found[k] for k in sequences.tolist()]


def cost_note(index: Index, chosen: Chosen, length: int) -> str:
    """What the plan says of reading a source this way."""
    sizes = index.stretches["size_bytes"]
    mean = float(sizes.mean()) if sizes.size else 0.0
    most = int(sizes.max(initial=0))
    note = (
        f"tokenized on the fly: a row of {length} tokens is {human_bytes(chosen.block_bytes)} of text, for which about "
        f"{human_bytes(mean)} are read; {chosen.cut_share:.1%} of the text is never trained on and "
        f"{chosen.padding_share:.1%} of the columns are padding"
    )
    if most > _LONG_SEEK_BYTES:
        note += f"; a seek may cost one file of up to {human_bytes(most)}: tokenize ahead, or unpack it"
    return note
