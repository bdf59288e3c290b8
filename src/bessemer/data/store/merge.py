"""Joins token stores: the many small ones that workers wrote become shards of about a gigabyte.

Bytes are copied, not interpreted, in blocks; the result is the store that one writer would have written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from bessemer.data.store.format import (
    COPY_ITEMS,
    OFFSET,
    SCORE,
    MaskWriter,
    StoreContent,
    StoreInfo,
    StringsWriter,
    read_about,
    remove_store,
)
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreFiles
from bessemer.errors import UserError

SHARD_BYTES = 10**9
_COPY_BYTES = 1 << 23


def merge(prefixes: Sequence[str], out: str | Path | Iterable[str], shard_bytes: int = SHARD_BYTES) -> int:
    """Stores joined, in their order: into one with the prefix `out`, or, given many prefixes to choose from, into as
    many as have about `shard_bytes` of tokens each. Returns how many it made; the given stores stay.

    A store that an earlier call had finished is kept. What a killed call left is written again.
    """
    abouts = [read_about(prefix) for prefix in prefixes]
    if isinstance(out, (str, Path)):
        _join(prefixes, abouts, str(out))
        return 1
    names, made = iter(out), 0
    for first, stop in _groups([about.sizes["bin"] for about in abouts], shard_bytes):
        _join(prefixes[first:stop], abouts[first:stop], next(names))
        made += 1
    return made


def _groups(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours that have at most so much together; what is larger alone stays alone."""
    first = total = 0
    for k, size in enumerate(sizes):
        if k > first and total + size > most:
            yield first, k
            first, total = k, 0
        total += size
    if sizes:
        yield first, len(sizes)


def _join(prefixes: Sequence[str], abouts: Sequence[StoreInfo], out: str) -> None:
    _check_kinship(prefixes, abouts)
    content = StoreContent()
    for about in abouts:
        content.join(StoreContent(about.fingerprint, about.documents))
    if _finished(out, abouts, content):
        return
    remove_store(out)
    stores = [TokenStore(prefix, about) for prefix, about in zip(prefixes, abouts, strict=True)]
    for store in stores:
        store.verify()
    files = StoreFiles(out)
    try:
        bin_file = files.open("bin")
        for store in stores:
            with open(f"{store.prefix}.bin", "rb", buffering=0) as part:
                shutil.copyfileobj(part, bin_file, _COPY_BYTES)
        _join_starts(stores, files.open("starts"))
        file_count = _join_origins(stores, files.open("origins"), files.open("files"))
        for suffix, join in (("mask", _join_masks), ("ids", _join_ids), ("scores", _join_scores)):
            if any(suffix in about.sizes for about in abouts):
                join(stores, files.open(suffix))
        files.commit(
            vocab=abouts[0].vocab,
            kept=sum(about.kept for about in abouts),
            text_bytes=sum(about.text_bytes for about in abouts),
            files=file_count,
            content=content,
            tokenizer_fingerprint=abouts[0].tokenizer_fingerprint,
        )
    except BaseException:
        files.discard()
        raise


def _check_kinship(prefixes: Sequence[str], abouts: Sequence[StoreInfo]) -> None:
    if not abouts:
        raise ValueError("no stores to join")
    for prefix, about in zip(prefixes, abouts, strict=True):
        if (about.vocab, about.tokenizer_fingerprint) != (abouts[0].vocab, abouts[0].tokenizer_fingerprint):
            raise UserError(
                f"{prefix}: was tokenized by another tokenizer than {prefixes[0]}; prepare one of them again"
            )


def _finished(out: str, abouts: Sequence[StoreInfo], content: StoreContent) -> bool:
    if not os.path.exists(f"{out}.json"):
        return False
    try:
        store = TokenStore(out)
        store.verify()
    except UserError:
        return False
    found = store.about
    return (
        found.fingerprint == content.hexdigest()
        and found.documents == content.documents
        and found.text_bytes == sum(about.text_bytes for about in abouts)
        and found.tokenizer_fingerprint == abouts[0].tokenizer_fingerprint
    )


def _join_starts(stores: Sequence[TokenStore], out: IO[bytes]) -> None:
    tokens = 0
    for store in stores:
        for first in range(0, store.documents, COPY_ITEMS):
            out.write((store.edges(first, min(first + COPY_ITEMS, store.documents))[:-1] + tokens).data)
        tokens += store.tokens
    out.write(np.array([tokens], OFFSET).data)


def _join_origins(stores: Sequence[TokenStore], out: IO[bytes], files: IO[bytes]) -> int:
    """The origins with files numbered anew; the number of files. One that goes on into the next store is listed once:
    only the last store's files are remembered, so memory does not grow with their number."""
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


def _join_masks(stores: Sequence[TokenStore], out: IO[bytes]) -> None:
    mask = MaskWriter(out)
    for store in stores:
        for first in range(0, store.tokens, COPY_ITEMS):
            length = min(COPY_ITEMS, store.tokens - first)
            weights = store.weights(np.array([first]), length)
            if weights is None:
                mask.append_ones(length)
            else:
                mask.append(weights[0].astype(np.uint8))
    mask.close()


def _join_ids(stores: Sequence[TokenStore], out: IO[bytes]) -> None:
    table = StringsWriter(out)
    for store in stores:
        if store.ids is None:
            table.append_empty(store.documents)
        else:
            table.append_table(store.ids)
    table.close()


def _join_scores(stores: Sequence[TokenStore], out: IO[bytes]) -> None:
    for store in stores:
        for first in range(0, store.documents, COPY_ITEMS):
            documents = np.arange(first, min(first + COPY_ITEMS, store.documents))
            out.write(store.scores(documents).astype(SCORE).data)
