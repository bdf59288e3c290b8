"""One part's documents as tokens: what a worker does between curation and the finished stores."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from bessemer.data.curate.files import byte_length, naming, text_hash
from bessemer.data.curate.ledger import read_cached, write_json
from bessemer.data.curate.passes import curated_documents
from bessemer.data.document import Document
from bessemer.data.encode import encode_documents
from bessemer.data.read import Part
from bessemer.data.store import StoreWriter, TokenStore
from bessemer.data.store_format import read_about
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


@dataclass(frozen=True)
class TokenizeTask:
    """A part, its state, and where its tokens go: `folder/parts/NUMBER.train` and `.validation`."""

    part: Part
    source: SourceSpec
    cache: Path
    ledgers: tuple[str, ...]
    folder: Path
    eos: str
    special: tuple[str, ...]
    seed: int
    limit: int  # documents whose hash lies below it are held out
    number: int
    alone: bool  # the only worker: it may use all cores
    template: str  # of conversations
    learn: Literal["all", "last"]
    label: str | None  # of the documents, kept as their score
    copies: Path | None

    @property
    def name(self) -> str:
        return f"source {self.part.source!r}, {self.part.name}"

    @property
    def mark(self) -> Path:
        return part_mark(self.folder, self.number)


def part_prefix(folder: Path, number: int, side: str) -> str:
    return str(folder / "parts" / f"{number:06d}.{side}")


def part_mark(folder: Path, number: int) -> Path:
    """Written when the part's stores are complete: the digest of each side's store, where it has one."""
    return folder / "parts" / f"{number:06d}.done"


def part_intact(task: TokenizeTask) -> bool:
    """Whether an earlier call finished the part, and its stores are still what it wrote: reads them whole."""
    stores = read_cached(task.mark)
    if stores is None:
        return False
    try:
        for side, digest in stores.items():
            store = TokenStore(part_prefix(task.folder, task.number, side))
            store.verify()
            if store.about.digest != digest:
                return False
    except UserError:
        return False
    return True


def tokenize_part(task: TokenizeTask) -> int:
    """Writes the part's stores; the number of tokens. A side without documents has no store."""
    tokenizer = _tokenizer(str(task.folder / "tokenizer.json"), task.eos, task.special)
    with naming(task.name, task.folder), contextlib.ExitStack() as stack:
        writers: dict[str, StoreWriter] = {}
        documents = curated_documents(task.part, task.source, task.cache, task.ledgers, task.copies)
        for document, tokens, mask in encode_documents(
            (found for _, found in documents), tokenizer, None if task.alone else 1, task.template, task.learn
        ):
            side = "validation" if text_hash(document.text, task.seed) < task.limit else "train"
            if side not in writers:
                prefix = part_prefix(task.folder, task.number, side)
                writers[side] = stack.enter_context(StoreWriter(prefix, tokenizer.vocab_size, tokenizer.fingerprint))
            writers[side].add(
                tokens, document.file, document.row, text_hash(document.text, 0), byte_length(document.text),
                mask=mask, id=document.id, score=_score(document, task.label),
            )  # fmt: skip
    write_json(task.mark, {side: read_about(writer.prefix).digest for side, writer in writers.items()})
    return sum(writer.tokens for writer in writers.values())


def _score(document: Document, label: str | None) -> float | None:
    if label is None:
        return None
    value = document.labels.get(label)
    if isinstance(value, (int, float)):
        return float(value)
    known = ", ".join(name for name, found in document.labels.items() if not isinstance(found, str)) or "none"
    raise UserError(f"{document.place}: data.curriculum.label: no step gave it a number {label!r}; it has {known}")


@lru_cache(2)
def _tokenizer(path: str, eos: str, special: tuple[str, ...]) -> Tokenizer:
    return Tokenizer.load(path, eos, special)
