"""Many token stores as one: a source at scale is thousands of shards, read as a single address space.

Where one shard ends and the next begins cannot be seen from outside: the same documents give the same tokens, numbers
and fingerprint in any division. A shard is opened when it is first read, and few are open at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.format import StoreContent, StoreInfo, read_about, token_dtype
from bessemer.data.store.merge import merge
from bessemer.data.store.token_store import Origin, TokenStore, are_long, copy_by_index, run_indices
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.data.store.remote import Lease, ShardCache

__all__ = ["ShardedStore", "merge", "open_stores", "shard_prefixes"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# A shard has at most six maps and the kernel allows 65,530 of a process, which several sources share.
_OPEN_SHARDS = 512


def shard_prefixes(folder: str | Path, source: str, side: str) -> Iterator[str]:
    """The prefixes of a source's shards, without end: as many as there are shards are used."""
    return (f"{folder}/{source}.{side}.{number:05d}" for number in count())


def open_stores(folder: str | Path, shards: Mapping[str, int], side: str) -> dict[str, ShardedStore]:
    """The store of each source, given how many shards it has."""
    found = {}
    for source, number in shards.items():
        prefixes = shard_prefixes(folder, source, side)
        found[source] = ShardedStore([next(prefixes) for _ in range(number)])
    return found


class ShardedStore:
    """Stores one after another, with the methods of a `TokenStore`; safe for many threads.

    Opening reads one small file per shard (30 µs each); a shard's own files are mapped when it is first read, the
    `open_shards` used last staying so. Prefixes may be URLs, read through a `cache` of whole shards on this machine.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        cache: ShardCache | None = None,
        abouts: Sequence[StoreInfo] | None = None,
        open_shards: int = _OPEN_SHARDS,
    ) -> None:
        self.prefixes, self.cache, self._open_shards = ([str(prefix) for prefix in prefixes], cache, open_shards)
        if abouts is None:
            abouts = cache.abouts(self.prefixes) if cache else [read_about(prefix) for prefix in self.prefixes]
        self.abouts = list(abouts)
        content = StoreContent()
        for prefix, about in zip(self.prefixes, self.abouts, strict=True):
            if (about.vocab, about.tokenizer_fingerprint) != (
                self.abouts[0].vocab,
                self.abouts[0].tokenizer_fingerprint,
            ):
                raise UserError(
                    f"{prefix}: was tokenized by another tokenizer than {self.prefixes[0]}; prepare one again"
                )
            content.join(StoreContent(about.fingerprint, about.documents))
            if cache:
                cache.check_limit(prefix, about)
        self.fingerprint = content.hexdigest()
        self.vocab = self.abouts[0].vocab if self.abouts else 0
        self.tokenizer_fingerprint = self.abouts[0].tokenizer_fingerprint if self.abouts else ""
        self.dtype = token_dtype(self.vocab)
        self.text_bytes = sum(about.text_bytes for about in self.abouts)
        self.masked = any("mask" in about.sizes for about in self.abouts)
        self._token_starts = _starts(about.tokens for about in self.abouts)
        self._document_starts = _starts(about.documents for about in self.abouts)
        self._kept_starts = _starts(about.kept for about in self.abouts)
        self.tokens, self.documents = int(self._token_starts[-1]), int(self._document_starts[-1])
        self.kept = int(self._kept_starts[-1])
        self._opened: OrderedDict[int, tuple[TokenStore, Lease | None]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedStore, (self.prefixes, self.cache, self.abouts, self._open_shards)

    @property
    def files(self) -> list[str]:
        """The paths that the documents came from, each once. Opens every shard."""
        return list(dict.fromkeys(path for k in range(len(self.prefixes)) for path in self.shard(k).files))

    @property
    def verifiable(self) -> bool:
        """What is read is compared with digests. False where a shard was written by an earlier version."""
        return all(CHUNKS in about.sizes for about in self.abouts)

    @property
    def far(self) -> bool:
        """Shards are fetched from afar when they are read."""
        return self.cache is not None

    def shard(self, number: int) -> TokenStore:
        """One of the shards, open; fetched first where it lies afar."""
        with self._lock:
            found = self._opened.get(number)
            if found:
                self._opened.move_to_end(number)
                store, lease = found
                if lease:
                    lease.touch()
                return store
        store, lease = self._open(number)
        with self._lock:
            if not (lease and lease.released):
                self._opened[number] = store, lease
            while len(self._opened) > self._open_shards:
                self._opened.popitem(last=False)  # who still reads it keeps the map alive
        return store

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop): a view of the file where they lie in one shard."""
        start, stop, _ = slice(start, stop).indices(self.tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        _, shards, local, lengths = self._segments(np.array([start]), np.array([stop - start]))
        parts = [self.shard(k).slice(a, a + n) for k, a, n in _each(shards, local, lengths)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def gather(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Row i holds the `length` tokens from `starts[i]` on, across shards where it must."""
        starts = np.asarray(starts, dtype=np.int64)
        out = np.empty((starts.size, length), self.dtype)
        lengths = np.full(starts.shape, length)
        self.copy_runs(starts, lengths, out.reshape(-1), np.arange(starts.size) * length)
        return out

    def weights(self, starts: Ints, length: int) -> Floats | None:
        """What `gather`'s tokens weigh as targets, 0 or 1; None when no shard has a mask."""
        if not self.masked:
            return None
        out = np.empty((starts.size, length), np.float32)
        lengths = np.full(starts.shape, length)
        self.copy_weights(starts, lengths, out.reshape(-1), np.arange(starts.size) * length)
        return out

    def runs(self, starts: Ints, lengths: Ints) -> npt.NDArray[Any]:
        """The `lengths[i]` tokens from `starts[i]` on, one run after another, in the store's type."""
        out = np.empty(int(lengths.sum()), self.dtype)
        self.copy_runs(starts, lengths, out, np.cumsum(lengths) - lengths)
        return out

    def copy_runs(self, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints, spill: bool = False) -> None:
        """Copies the `lengths[i]` tokens from `starts[i]` on to `out[at[i]:]`; `spill`: also between the runs."""
        shards, local, lengths, at = self._cut_runs(starts, lengths, at)
        if are_long(lengths):
            for k, start, length, to in _each(shards, local, lengths, at):
                out[to : to + length] = self.shard(k).slice(start, start + length)
        else:
            for k, here in _groups(shards):
                store, alone = self.shard(k), isinstance(here, slice)
                store.check_tokens(local[here], lengths[here])
                copy_by_index(store.tokens_at, local[here], lengths[here], out, at[here], spill and alone)

    def copy_weights(self, starts: Ints, lengths: Ints, out: Floats, at: Ints, spill: bool = False) -> None:
        """The same for what the tokens weigh as targets, 0 or 1."""
        shards, local, lengths, at = self._cut_runs(starts, lengths, at)
        if are_long(lengths):
            for k, start, length, to in _each(shards, local, lengths, at):
                store = self.shard(k)
                store.check_mask(np.array([start]), length)
                out[to : to + length] = store.run_weights(start, length)
        else:
            for k, here in _groups(shards):
                store, alone = self.shard(k), isinstance(here, slice)
                store.check_mask(local[here], lengths[here])
                copy_by_index(store.weights_at, local[here], lengths[here], out, at[here], spill and alone)

    def kept_before(self, positions: Ints) -> Ints:
        """The sum of the weights of all tokens before each position: a lookup, not a scan."""
        if not self.masked:
            return positions
        shards = self._shard_of(np.minimum(positions, self.tokens - 1))
        local = positions - self._token_starts[shards]
        found = self._kept_starts[shards] + local
        for k, here in _groups(shards):
            if "mask" in self.abouts[k].sizes:
                found[here] += self.shard(k).kept_before(local[here]) - local[here]
        return found

    def scores(self, documents: Ints) -> Floats:
        """What each document was scored with; NaN where it was not."""
        found = np.full(documents.shape, np.nan, np.float32)
        shards = self._shard_with(documents)
        for k, here in _groups(shards):
            if "scores" in self.abouts[k].sizes:
                found[here] = self.shard(k).scores(documents[here] - self._document_starts[k])
        return found

    def document_of(self, positions: Ints) -> Ints:
        """Number of the document that holds each token."""
        positions = np.asarray(positions, dtype=np.int64)
        self._check_runs(positions, 1)
        shards = self._shard_of(positions)
        local, found = positions - self._token_starts[shards], self._document_starts[shards]
        for k, here in _groups(shards):
            found[here] += self.shard(k).document_of(local[here])
        return found

    def documents_in(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """For each window of tokens: its first document, how many more begin inside it, and (flat) where."""
        self._check_runs(starts, lengths)
        window, shards, local, cut = self._segments(starts, lengths)
        if shards.size and (shards == shards[0]).all():
            k = int(shards[0])
            first, more, inner = self.shard(k).documents_in(local, cut)
            return first + self._document_starts[k], more, inner + self._token_starts[k]
        # One window at a time: when most lie in shards of their own, arrays of them would be hardly longer.
        leads = np.diff(window, prepend=-1) > 0
        found, begun = np.empty_like(local), [np.empty(0, np.int64)]
        segments = zip(shards.tolist(), local.tolist(), (local + cut).tolist(), leads.tolist(), strict=True)
        for i, (k, begin, end, leading) in enumerate(segments):
            document, inner = self.shard(k).begins_in(begin, end)
            found[i] = document + self._document_starts[k]
            if not leading:  # the window goes on into this shard, whose first document begins inside it
                inner = np.concatenate([[begin], inner])
            begun.append(inner + self._token_starts[k])
        counts = np.array([inner.size for inner in begun[1:]], np.int64)
        more = np.bincount(window, weights=counts, minlength=starts.size).astype(np.int64)
        return found[leads], more, np.concatenate(begun)

    def extents(self, documents: Ints) -> tuple[Ints, Ints]:
        """The first token of each document and the one behind its last."""
        shards = self._shard_with(documents)
        starts, stops = self._token_starts[shards], self._token_starts[shards]
        local = documents - self._document_starts[shards]
        for k, here in _groups(shards):
            begin, end = self.shard(k).extents(local[here])
            starts[here] += begin
            stops[here] += end
        return starts, stops

    def edges(self, first: int, stop: int) -> Ints:
        """Where the documents from `first` on begin, and where the one before `stop` ends."""
        k, last = self._shard_with(np.array([first, max(first, stop - 1)])).tolist()
        parts = []
        while k <= last:
            begin, end = self._document_starts[k : k + 2].tolist()
            inside = self.shard(k).edges(max(first, begin) - begin, min(stop, end) - begin)
            parts.append((inside if k == last else inside[:-1]) + self._token_starts[k])
            k += 1
        return np.concatenate(parts)

    def origin(self, position: int) -> Origin:
        """Where the token at `position` came from."""
        return self.origin_of_document(int(self.document_of(np.array([position]))[0]))

    def origin_of_document(self, document: int) -> Origin:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document}, but {self.documents} in all")
        k = int(self._shard_with(np.array([document]))[0])
        first, tokens = int(self._document_starts[k]), int(self._token_starts[k])
        found = self.shard(k).origin_of_document(document - first)
        return Origin(found.file, found.row, found.document_id, document, found.start + tokens, found.stop + tokens)

    def expect(self, starts: Ints, lengths: Ints) -> None:
        """Told which tokens will be read soon, fetches their shards in the background."""
        if self.cache and starts.size:
            _, shards, _, _ = self._segments(starts, lengths)
            wanted = [k for k in dict.fromkeys(shards.tolist()) if k not in self._opened]
            self.cache.expect([(self.prefixes[k], self.abouts[k]) for k in wanted])

    def _open(self, number: int) -> tuple[TokenStore, Lease | None]:
        prefix, about = self.prefixes[number], self.abouts[number]
        while self.cache:
            lease = self.cache.fetch(prefix, about, self._close, number)
            try:
                store = TokenStore(lease.prefix, about)
                store.map_all()
                return store, lease
            except (UserError, OSError):
                if not lease.released:  # else it had to make room at this very moment: fetch it again
                    raise
        return TokenStore(prefix, about), None

    def _close(self, number: int) -> None:
        with self._lock:
            self._opened.pop(number, None)

    def _shard_of(self, positions: Ints) -> Ints:
        """The shard of each token; of several that begin there, all but the last are empty."""
        return np.searchsorted(self._token_starts, positions, side="right") - 1

    def _shard_with(self, documents: Ints) -> Ints:
        return np.searchsorted(self._document_starts, documents, side="right") - 1

    def _segments(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Windows cut at the borders of shards: (window, shard, first token in the shard, length) of each piece."""
        first = self._shard_of(starts)
        spread = self._shard_of(starts + lengths - 1) - first
        window = np.arange(starts.size)
        if not spread.any():
            return window, first, starts - self._token_starts[first], lengths
        window, shards = np.repeat(window, spread + 1), run_indices(first, spread + 1)
        begin = np.maximum(starts[window], self._token_starts[shards])
        end = np.minimum((starts + lengths)[window], self._token_starts[shards + 1])
        real = end > begin  # shards without tokens may lie between
        return window[real], shards[real], (begin - self._token_starts[shards])[real], (end - begin)[real]

    def _cut_runs(self, starts: Ints, lengths: Ints, at: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Runs cut at the borders of shards: (shard, start in it, length, where it goes) of each piece."""
        self._check_runs(starts, lengths)
        window, shards, local, cut = self._segments(starts, lengths)
        return shards, local, cut, at[window] + local + self._token_starts[shards] - starts[window]

    def _check_runs(self, starts: Ints, lengths: Ints | int) -> None:
        if starts.size and (starts.min() < 0 or (starts + lengths).max() > self.tokens):
            most = np.max(lengths)
            raise IndexError(f"{most} tokens from {starts.min()}..{starts.max()}, but {self.tokens} in all")


def _starts(sizes: Any) -> Ints:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _groups(shards: Ints) -> Iterator[tuple[int, Ints | slice]]:
    """Each shard with the indices that name it; a slice where that is all of them."""
    if shards.size == 0:
        return
    if (shards == shards[0]).all():
        yield int(shards[0]), slice(None)
        return
    order = np.argsort(shards, kind="stable")
    cuts = np.flatnonzero(np.diff(shards[order])) + 1
    for at in np.split(order, cuts):
        yield int(shards[at[0]]), at


def _each(*columns: Ints) -> Iterator[tuple[int, ...]]:
    """Row by row, as Python numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)
