"""Tokenizes documents: `tokenize_part` writes the token stores of one part of the corpus, in a worker.

Threads encode the text while the caller writes. Memory is bounded: a few batches are in progress at a time, and a long
document is encoded in pieces. The ids do not depend on batches or threads.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.ledger import byte_length, hash_text, name_in_errors, read_cached, write_json
from bessemer.data.curate.passes import read_curated_documents
from bessemer.data.read import SourcePart
from bessemer.data.read.answers import divide_answers
from bessemer.data.read.chat_turns import MESSAGE_WEIGHT
from bessemer.data.read.entry import Document
from bessemer.data.store.format import read_info, token_dtype
from bessemer.data.store.shard import Shard
from bessemer.data.store.writer import StoreWriter
from bessemer.data.tokenizer.chat import Learn, Rendered, find_problems, find_template, render_batch
from bessemer.data.tokenizer.labelled import EncodedRow, LabelledRows
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.data import SourceSpec

Ids = npt.NDArray[Any]  # of the store's type
Mask = npt.NDArray[Any]  # 0 and 1, or weights of messages
Encoded = tuple[Ids, Mask | None]

# Encoding by `tokenizers` takes 50 times the memory of the text, so batches are only as large as a core needs.
_BATCH_CHARS = 1 << 18
_PIECE_CHARS = 1 << 17


@dataclass(slots=True)
class _Piece:
    """A document, or a piece of a long one."""

    document: Document
    text: str
    continues: bool = False
    last: bool = True


def encode_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    threads: int | None = None,
    template: str | None = None,
    learn: Learn = "all",
) -> Iterator[tuple[Document, Ids, Mask | None]]:
    """Yields each document with its ids, including the end-of-document id, in the store's type, and its mask.

    With a chat `template`, a document with messages is laid out by it and has a mask: 1 where the loss counts, 0 on
    the end of document. Other documents have none. `threads` encode at a time (default: one per core).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or cores
    # The library spreads a batch over all cores; two batches in progress leave none idle at the end of one.
    spread = tokenizer.fast is None and threads >= cores
    workers, batch_chars = (2, threads * _BATCH_CHARS // 2) if spread else (threads, _BATCH_CHARS)
    end = np.array([tokenizer.eos_id], token_dtype(tokenizer.vocab_size))
    begun: list[Ids] = []

    def assemble(pieces: Sequence[_Piece], encoded: Sequence[Encoded]) -> Iterator[tuple[Document, Ids, Mask | None]]:
        """Joins the pieces of a document and appends the end-of-document id."""
        for piece, (ids, mask) in zip(pieces, encoded, strict=True):
            begun.append(ids)
            if not piece.last:
                continue
            ended = mask is not None and ids.size and ids[-1] == end[0]  # some templates end with it
            tokens = np.concatenate(begun if ended else [*begun, end])
            begun.clear()
            if mask is not None and not ended:
                mask = np.append(mask, mask.dtype.type(0))
            yield piece.document, tokens, mask

    waiting: deque[tuple[list[_Piece], Future[list[Encoded]]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(documents, tokenizer, template, batch_chars):
                waiting.append((batch, pool.submit(_encode, batch, tokenizer, template, learn, spread)))
                if len(waiting) > workers:
                    pieces, encoded = waiting.popleft()
                    yield from assemble(pieces, encoded.result())
            while waiting:
                pieces, encoded = waiting.popleft()
                yield from assemble(pieces, encoded.result())
        finally:
            for _, encoded in waiting:
                encoded.cancel()


def _batches(
    documents: Iterable[Document], tokenizer: Tokenizer, template: str | None, most_chars: int
) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    chars, checked = 0, False
    for document in documents:
        is_chat = template is not None and document.messages is not None
        if is_chat and template is not None and not checked:
            find_template(template, tokenizer)  # an unusable template is not a document's error
            checked = True
        for piece in [_Piece(document, document.text)] if is_chat else _cut(document, tokenizer):
            batch.append(piece)
            chars += len(piece.text) + 1
            if chars >= most_chars:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _cut(document: Document, tokenizer: Tokenizer) -> Iterator[_Piece]:
    done = 0
    for text in tokenizer.cut(document.text, _PIECE_CHARS):
        done += len(text)
        yield _Piece(document, text, done > len(text), done == len(document.text))


def _encode(
    batch: Sequence[_Piece], tokenizer: Tokenizer, template: str | None, learn: Learn, spread: bool
) -> list[Encoded]:
    dtype = token_dtype(tokenizer.vocab_size)
    chats = [i for i, piece in enumerate(batch) if template is not None and piece.document.messages is not None]
    texts = sorted(set(range(len(batch))) - set(chats))
    results: list[Encoded] = [(np.empty(0, dtype), None)] * len(batch)
    if chats:
        assert template is not None
        rendered = _render([batch[i].document for i in chats], tokenizer, template, learn)
        for i, (ids, mask) in zip(chats, rendered, strict=True):
            results[i] = ids.astype(dtype), mask
    for some in [texts] if spread else [[i] for i in texts]:
        encoded = tokenizer.encode_arrays([batch[i].text for i in some], [batch[i].continues for i in some])
        for i, ids in zip(some, encoded, strict=True):
            results[i] = ids.astype(dtype), None
    return results


def _render(documents: Sequence[Document], tokenizer: Tokenizer, template: str, learn: Learn) -> list[Rendered]:
    try:
        return render_batch([document.messages or [] for document in documents], tokenizer, template, learn)
    except (UserError, KeyError, TypeError) as error:
        if len(documents) > 1:  # find the one
            return [_render([document], tokenizer, template, learn)[0] for document in documents]
        wrong = find_problems(documents[0].messages)
        reason = str(error) if isinstance(error, UserError) or not wrong else f"{wrong[0]}; correct or delete it"
        raise UserError(f"{documents[0].place}: {reason}") from error


@dataclass(frozen=True)
class TokenizeTask:
    """One part to tokenize into `folder/parts/NUMBER.train` and `.validation`."""

    part: SourcePart
    source: SourceSpec
    cache: Path
    ledgers: tuple[str, ...]
    folder: Path
    eos: str
    special: tuple[str, ...]
    seed: int
    limit: int  # documents whose hash is below it are held out
    number: int
    alone: bool  # the only worker: it may use all cores
    template: str  # of conversations
    learn: Learn
    label: str | None  # stored as the documents' score
    copies: Path | None
    labels: ClassifySpec | None = None  # rows have labels

    @property
    def name(self) -> str:
        return f"source {self.part.source!r}, {self.part.name}"

    @property
    def mark(self) -> Path:
        return part_mark(self.folder, self.number)


def part_prefix(folder: Path, number: int, side: str) -> str:
    return str(folder / "parts" / f"{number:06d}.{side}")


def part_mark(folder: Path, number: int) -> Path:
    """The file that marks a part as complete, with the digest of each side's store."""
    return folder / "parts" / f"{number:06d}.done"


def is_part_intact(task: TokenizeTask) -> bool:
    """Whether an earlier call finished the part and its stores still match their digests. Reads them completely."""
    stores = read_cached(task.mark)
    if stores is None:
        return False
    try:
        for side, digest in stores.items():
            shard = Shard(part_prefix(task.folder, task.number, side))
            shard.verify()
            if shard.info.digest != digest:
                return False
    except UserError:
        return False
    return True


def tokenize_part(task: TokenizeTask) -> int:
    """Writes the part's stores and returns the number of tokens. A side without documents has no store."""
    tokenizer = _tokenizer(str(task.folder / "tokenizer.json"), task.eos, task.special)
    with name_in_errors(task.name, task.folder), contextlib.ExitStack() as stack:
        writers: dict[str, StoreWriter] = {}
        labelled = LabelledRows(task.labels, tokenizer) if task.labels else None
        documents = read_curated_documents(task.part, task.source, task.cache, task.ledgers, task.copies)
        for document, tokens, mask in encode_documents(
            divide_answers((document for _, document in documents), task.learn == "everything"), tokenizer,
            None if task.alone else 1, task.template, task.learn,
        ):  # fmt: skip
            fields = document.fields if task.source.has_answers else {}
            weights: dict[str, npt.NDArray[Any]] = {}
            if task.source.message_weights:
                weights[MESSAGE_WEIGHT] = np.ones(tokens.size, np.float32) if mask is None else mask.astype(np.float32)
            mask = None if mask is None else (mask > 0).astype(np.uint8)
            row = labelled.encode(document, tokens) if labelled else EncodedRow(tokens, mask, fields, weights)
            side = "validation" if hash_text(document.text, task.seed) < task.limit else "train"
            if side not in writers:
                prefix = part_prefix(task.folder, task.number, side)
                writers[side] = stack.enter_context(StoreWriter(prefix, tokenizer.vocab_size, tokenizer.fingerprint))
            writers[side].add(
                row.tokens, document.file, document.row, hash_text(document.text, 0), byte_length(document.text),
                mask=row.mask, id=document.id, score=_score(document, task.label), fields=row.fields,
                token_fields=row.token_fields,
            )  # fmt: skip
    write_json(task.mark, {side: read_info(writer.prefix).digest for side, writer in writers.items()})
    return sum(writer.tokens for writer in writers.values())


def _score(document: Document, label: str | None) -> float | None:
    if label is None:
        return None
    value = document.labels.get(label)
    if isinstance(value, (int, float)):
        return float(value)
    labels = ", ".join(name for name, value in document.labels.items() if not isinstance(value, str)) or "none"
    raise UserError(f"{document.place}: data.curriculum.label: no step gave it a number {label!r}; it has {labels}")


@lru_cache(2)
def _tokenizer(path: str, eos: str, special: tuple[str, ...]) -> Tokenizer:
    return Tokenizer.load(path, eos, special)
