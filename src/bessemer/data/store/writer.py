"""Writes a token store, one document at a time."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import DigestWriter, content_digest
from bessemer.data.store.format import (
    COPY_ITEMS,
    SCORE,
    SUFFIXES,
    MaskWriter,
    StoreContent,
    StoreInfo,
    StringsWriter,
    commit,
    remove_store,
    token_dtype,
    write_index,
)
from bessemer.storage import sync_file, temporary_path


class StoreFiles:
    """The files of a store while they are written, hashed on the way, under names of their own until `commit`.

    Two writers of one prefix (one of them orphaned by a kill, or on a file system without locks) write the same bytes:
    whichever commits last, each file is whole.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        self._files: dict[str, IO[bytes]] = {}
        self._paths: dict[str, str] = {}
        self._digests = DigestWriter()

    def open(self, suffix: str) -> IO[bytes]:
        self._paths[suffix] = str(temporary_path(f"{self.prefix}.{suffix}"))
        self._files[suffix] = self._digests.open(suffix, self._paths[suffix])
        return self._files[suffix]

    def commit(
        self, vocab: int, kept: int, text_bytes: int, files: int, content: StoreContent, tokenizer_fingerprint: str
    ) -> None:
        """Writes the `.idx`, the digests and the `.json`. The `.starts` are complete."""
        dtype = token_dtype(vocab)
        self._files["starts"].flush()
        write_index(self.open("idx"), self._paths["starts"], content.documents, dtype)
        for file in self._files.values():
            sync_file(file)
            file.close()
        digests = self._digests.content()
        self._paths[CHUNKS] = str(temporary_path(f"{self.prefix}.{CHUNKS}"))
        with open(self._paths[CHUNKS], "wb") as file:
            file.write(digests)
            sync_file(file)
        sizes = {suffix: os.path.getsize(path) for suffix, path in self._paths.items()}
        Path(f"{self.prefix}.json").unlink(missing_ok=True)
        for suffix in SUFFIXES:
            if suffix in self._paths:
                os.replace(self._paths[suffix], f"{self.prefix}.{suffix}")
            else:
                Path(f"{self.prefix}.{suffix}").unlink(missing_ok=True)
        about = StoreInfo(
            vocab=vocab, documents=content.documents, tokens=sizes["bin"] // dtype.itemsize, kept=kept,
            text_bytes=text_bytes, files=files, fingerprint=content.hexdigest(),
            tokenizer_fingerprint=tokenizer_fingerprint, sizes=sizes, sums={CHUNKS: content_digest(digests)},
        )  # fmt: skip
        commit(self.prefix, about)

    def discard(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # on a full disk the rest cannot be written
                file.close()
        for path in self._paths.values():
            Path(path).unlink(missing_ok=True)


class StoreWriter:
    """Writes a store, one document at a time, in memory that does not grow with the tokens.

    Leaving the `with` block commits; leaving it by an exception deletes what was written. A store that already has
    the prefix is deleted at once.
    """

    def __init__(self, prefix: str | Path, vocab: int, tokenizer_fingerprint: str) -> None:
        self.prefix = str(prefix)
        self.vocab = vocab
        self.dtype = token_dtype(vocab)
        self.documents = 0
        self.tokens = 0
        self.text_bytes = 0
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._content = StoreContent()
        remove_store(self.prefix)
        self._out = StoreFiles(self.prefix)
        self._bin, self._starts, self._origins = (self._out.open(suffix) for suffix in ("bin", "starts", "origins"))
        self._files = StringsWriter(self._out.open("files"))
        self._numbers: dict[str, int] = {}
        self._mask: MaskWriter | None = None
        self._ids: StringsWriter | None = None
        self._scores: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def add(
        self,
        tokens: npt.ArrayLike,
        file: str,
        row: int,
        text_hash: int,
        text_bytes: int,
        *,
        mask: npt.ArrayLike | None = None,
        id: str = "",
        score: float | None = None,
    ) -> None:
        """Appends a document. `tokens` ends with the end-of-document id; `file` is the path to show to a user.

        `mask` is 0 for a token that is not to be learnt as a target, else 1. `id` is the document's own, `score` is
        what a curriculum may sort by.
        """
        ids = np.asarray(tokens)
        assert ids.ndim == 1 and 0 < ids.size < 1 << 31, "a document has between 1 and 2^31 - 1 tokens"
        assert ids.min() >= 0 and ids.max() < self.vocab, "a token id lies outside the vocabulary"
        data = np.ascontiguousarray(ids, dtype=self.dtype).data
        number = self._numbers.get(file)
        if number is None:
            number = self._numbers[file] = len(self._numbers)
            self._files.append(file)
        self._bin.write(data)
        self._starts.write(struct.pack("<q", self.tokens))
        self._origins.write(struct.pack("<IQQ", number, row, text_hash))
        self._content.add(data, self._add_mask(mask, ids.size))
        if id or self._ids is not None:
            self._add_id(id)
        if score is not None or self._scores is not None:
            self._add_score(score)
        self.documents += 1
        self.tokens += ids.size
        self.text_bytes += text_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        else:
            self._out.discard()

    def _add_mask(self, mask: npt.ArrayLike | None, tokens: int) -> memoryview | None:
        """The mask as the fingerprint sees it: None where every token counts."""
        if mask is None:
            if self._mask is not None:
                self._mask.append_ones(tokens)
            return None
        bits = np.array(mask, dtype=np.uint8)  # a copy: it waits in a buffer
        assert bits.shape == (tokens,) and bits.max() <= 1, "a mask has a 0 or a 1 for every token"
        if self._mask is None:  # the first of the store: until here every token counted
            self._mask = MaskWriter(self._out.open("mask"))
            self._mask.append_ones(self.tokens)
        self._mask.append(bits)
        return None if bits.all() else bits.data

    def _add_id(self, id: str) -> None:
        if self._ids is None:
            self._ids = StringsWriter(self._out.open("ids"))
            self._ids.append_empty(self.documents)
        self._ids.append(id)

    def _add_score(self, score: float | None) -> None:
        if self._scores is None:
            self._scores = self._out.open("scores")
            for first in range(0, self.documents, COPY_ITEMS):
                unknown = np.full(min(COPY_ITEMS, self.documents - first), np.nan, SCORE)
                self._scores.write(unknown.tobytes())
        self._scores.write(struct.pack("<f", np.nan if score is None else score))

    def _finish(self) -> None:
        self._starts.write(struct.pack("<q", self.tokens))
        for column in (self._files, self._mask, self._ids):
            if column is not None:
                column.close()
        self._out.commit(
            vocab=self.vocab,
            kept=self._mask.kept if self._mask else self.tokens,
            text_bytes=self.text_bytes,
            files=len(self._numbers),
            content=self._content,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
        )
