"""Writes token stores: one document at a time, or by joining the small stores of many workers into large shards."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import GroupWriter
from bessemer.data.store.format import (
    COPY_ITEMS,
    FIELD,
    OFFSET,
    SCORE,
    SUFFIXES,
    MaskWriter,
    StoreContent,
    StoreInfo,
    StringsWriter,
    check_tokenizers,
    commit_store,
    read_info,
    remove_store,
    token_dtype,
    write_index,
)
from bessemer.data.store.shard import Shard
from bessemer.errors import UserError

SHARD_BYTES = 10**9
_COPY_BYTES = 1 << 23


def _commit(
    files: GroupWriter,
    vocab: int,
    target_count: int,
    text_bytes: int,
    file_count: int,
    content: StoreContent,
    tokenizer_fingerprint: str,
    fields: dict[str, tuple[str, int]],
) -> None:
    """Writes the `.idx` and makes the files a store; the `.starts` must be complete."""
    dtype = token_dtype(vocab)
    write_index(files.open("idx"), files.flushed_path("starts"), content.documents, dtype)
    sizes, chunks = files.finish()
    for suffix in set(SUFFIXES) - sizes.keys():  # of an older store
        Path(f"{files.prefix}.{suffix}").unlink(missing_ok=True)
    info = StoreInfo(
        vocab=vocab, documents=content.documents, tokens=sizes["bin"] // dtype.itemsize, kept=target_count,
        text_bytes=text_bytes, files=file_count, fingerprint=content.hexdigest(),
        tokenizer_fingerprint=tokenizer_fingerprint, sizes=sizes, sums={CHUNKS: chunks}, fields=fields,
    )  # fmt: skip
    commit_store(files.prefix, info)


class StoreWriter:
    """Writes a store, one document at a time, in constant memory.

    Leaving the `with` block commits; an exception deletes what was written. An existing store is deleted at once.
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
        self._out = GroupWriter(self.prefix)
        self._bin, self._starts, self._origins = (self._out.open(suffix) for suffix in ("bin", "starts", "origins"))
        self._files = StringsWriter(self._out.open("files"))
        self._numbers: dict[str, int] = {}
        self._mask: MaskWriter | None = None
        self._ids: StringsWriter | None = None
        self._scores: IO[bytes] | None = None
        self._fields: dict[str, tuple[str, int]] = {}
        self._field_files: dict[str, IO[bytes]] = {}

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
        fields: Mapping[str, npt.NDArray[Any]] | None = None,
        token_fields: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        """Appends a document. `tokens` ends with the end-of-document id; `file` is the path to show to a user.

        `mask` is 1 for a token that counts as a target, else 0. A curriculum may sort by `score`. All documents of a
        store have the same `fields`, of the same size, and the same `token_fields`, with a number for each token.
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
        values = self._add_fields(fields or {}, token_fields or {}, ids.size)
        self._content.add(data, self._add_mask(mask, ids.size), values)
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
        with ExitStack() as undo:
            undo.callback(self._out.discard)
            if kind is None:
                self._finish()
                undo.pop_all()

    def _add_mask(self, mask: npt.ArrayLike | None, tokens: int) -> memoryview | None:
        """The mask for the fingerprint: None if every token counts."""
        if mask is None:
            if self._mask is not None:
                self._mask.append_ones(tokens)
            return None
        bits = np.array(mask, dtype=np.uint8)  # a copy: it waits in a buffer
        assert bits.shape == (tokens,) and bits.max() <= 1, "a mask has a 0 or a 1 for every token"
        if self._mask is None:  # the first mask of the store: all tokens so far count
            self._mask = MaskWriter(self._out.open("mask"))
            self._mask.append_ones(self.tokens)
        self._mask.append(bits)
        return None if bits.all() else bits.data

    def _add_fields(
        self, fields: Mapping[str, npt.NDArray[Any]], token_fields: Mapping[str, npt.NDArray[Any]], tokens: int
    ) -> bytes:
        """The fields for the fingerprint."""
        kinds = {name: (array.dtype.newbyteorder("<").str, array.size) for name, array in fields.items()}
        kinds |= {name: (array.dtype.newbyteorder("<").str, 0) for name, array in token_fields.items()}
        assert all(array.shape == (tokens,) for array in token_fields.values()), "a token field has a number per token"
        if self.documents == 0:
            self._fields = kinds
            self._field_files = {name: self._out.open(FIELD + name) for name in kinds}
        assert kinds == self._fields, f"documents of a store have the same fields: {kinds} after {self._fields}"
        content = {
            name: np.ascontiguousarray(array, self._fields[name][0]).tobytes()
            for name, array in sorted({**fields, **token_fields}.items())
        }
        for name, data in content.items():
            self._field_files[name].write(data)
        return b"".join(name.encode() + data for name, data in content.items())

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
        target_count = self._mask.kept if self._mask else self.tokens
        totals = self.vocab, target_count, self.text_bytes, len(self._numbers)
        _commit(self._out, *totals, self._content, self._tokenizer_fingerprint, self._fields)


def merge(prefixes: Sequence[str], out: Iterable[str], shard_bytes: int = SHARD_BYTES) -> int:
    """Joins stores, in their order, into shards with about `shard_bytes` of tokens each; returns their number.

    `out` has the prefixes of the shards, at least as many as needed. The given stores stay. A shard that an earlier
    call finished is kept; what a killed call left is written again. Bytes are copied in blocks: the result is the store
    that one writer would have written.
    """
    infos = [read_info(prefix) for prefix in prefixes]
    names, shards = iter(out), 0
    for first, stop in _groups([info.sizes["bin"] for info in infos], shard_bytes):
        _join(prefixes[first:stop], infos[first:stop], next(names))
        shards += 1
    return shards


def _groups(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours with at most this size together, or one larger element."""
    first = total = 0
    for k, size in enumerate(sizes):
        if k > first and total + size > most:
            yield first, k
            first, total = k, 0
        total += size
    if sizes:
        yield first, len(sizes)


def _join(prefixes: Sequence[str], infos: Sequence[StoreInfo], out: str) -> None:
    check_tokenizers(prefixes, infos)
    assert all(info.fields == infos[0].fields for info in infos), "parts of a source have the same fields"
    content = StoreContent()
    for info in infos:
        content.join(StoreContent(info.fingerprint, info.documents))
    if _is_finished(out, infos, content):
        return
    remove_store(out)
    stores = [Shard(prefix, info) for prefix, info in zip(prefixes, infos, strict=True)]
    for store in stores:
        store.verify()
    files = GroupWriter(out)
    try:
        bin_file = files.open("bin")
        for store in stores:
            with open(f"{store.prefix}.bin", "rb", buffering=0) as part:
                shutil.copyfileobj(part, bin_file, _COPY_BYTES)
        _join_starts(stores, files.open("starts"))
        file_count = _join_origins(stores, files.open("origins"), files.open("files"))
        for suffix, join in (("mask", _join_masks), ("ids", _join_ids), ("scores", _join_scores)):
            if any(suffix in info.sizes for info in infos):
                join(stores, files.open(suffix))
        for name in infos[0].fields:
            field_file = files.open(FIELD + name)
            for store in stores:
                with open(f"{store.prefix}.{FIELD}{name}", "rb", buffering=0) as part:
                    shutil.copyfileobj(part, field_file, _COPY_BYTES)
        target_count, text_bytes = sum(info.kept for info in infos), sum(info.text_bytes for info in infos)
        totals = infos[0].vocab, target_count, text_bytes, file_count
        _commit(files, *totals, content, infos[0].tokenizer_fingerprint, infos[0].fields)
    except BaseException:
        files.discard()
        raise


def _is_finished(out: str, infos: Sequence[StoreInfo], content: StoreContent) -> bool:
    if not os.path.exists(f"{out}.json"):
        return False
    try:
        shard = Shard(out)
        shard.verify()
    except UserError:
        return False
    info = shard.info
    return (
        info.fingerprint == content.hexdigest()
        and info.documents == content.documents
        and info.text_bytes == sum(part.text_bytes for part in infos)
        and info.tokenizer_fingerprint == infos[0].tokenizer_fingerprint
    )


def _join_starts(stores: Sequence[Shard], out: IO[bytes]) -> None:
    tokens = 0
    for store in stores:
        for first in range(0, store.documents, COPY_ITEMS):
            out.write((store.edges(first, min(first + COPY_ITEMS, store.documents))[:-1] + tokens).data)
        tokens += store.tokens
    out.write(np.array([tokens], OFFSET).data)


def _join_origins(stores: Sequence[Shard], out: IO[bytes], files: IO[bytes]) -> int:
    """The origins with new file indices; returns the number of files. A file that continues in the next store is listed
    once: only the last store's files are remembered, so memory does not grow with their number."""
    table, last = StringsWriter(files), dict[str, int]()
    for store in stores:
        numbers: dict[str, int] = {}
        for path in store.files:
            if path in last:
                numbers[path] = last[path]
            else:
                numbers[path] = len(table)
                table.append(path)
        new = np.fromiter((numbers[path] for path in store.files), np.uint32)
        for first in range(0, store.documents, COPY_ITEMS):
            block = store.origins_of(first, min(first + COPY_ITEMS, store.documents))
            block["file"] = new[block["file"]]
            out.write(block.data)
        last = numbers or last
    table.close()
    return len(table)


def _join_masks(stores: Sequence[Shard], out: IO[bytes]) -> None:
    mask = MaskWriter(out)
    for store in stores:
        for first in range(0, store.tokens, COPY_ITEMS):
            length = min(COPY_ITEMS, store.tokens - first)
            store.check_mask(np.array([first]), length)
            weights = store.run_weights(first, length)
            if isinstance(weights, int):
                mask.append_ones(length)
            else:
                mask.append(weights)
    mask.close()


def _join_ids(stores: Sequence[Shard], out: IO[bytes]) -> None:
    table = StringsWriter(out)
    for store in stores:
        if store.ids is None:
            table.append_empty(store.documents)
        else:
            table.append_table(store.ids)
    table.close()


def _join_scores(stores: Sequence[Shard], out: IO[bytes]) -> None:
    for store in stores:
        for first in range(0, store.documents, COPY_ITEMS):
            documents = np.arange(first, min(first + COPY_ITEMS, store.documents))
            out.write(store.scores(documents).astype(SCORE).data)
