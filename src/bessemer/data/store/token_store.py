"""A token store: the shards of a source, read as one address space of tokens and documents.

Shard boundaries are invisible from outside: the same documents give the same tokens, numbers and fingerprint in any
division. A shard is opened when it is first read, and few are open at a time. Shards may lie in an object store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.format import StoreContent, StoreInfo, check_tokenizers, read_info, token_dtype
from bessemer.data.store.shard import Origin, Shard, run_indices
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.data.store.remote import Lease, ShardCache

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# A shard has at most six maps and the kernel allows 65,530 of a process, which several sources share.
_OPEN_SHARDS = 512
_LONG_RUN = 256  # mean tokens above which runs are copied one by one
_INDEX_ITEMS = 1 << 14


def shard_prefixes(folder: str | Path, source: str, side: str) -> Iterator[str]:
    """The prefixes of a source's shards, without end."""
    return (f"{folder}/{source}.{side}.{number:05d}" for number in count())


def open_stores(folder: str | Path, shards: Mapping[str, int], side: str) -> dict[str, TokenStore]:
    """The store of each source, given its number of shards."""
    stores = {}
    for source, number in shards.items():
        prefixes = shard_prefixes(folder, source, side)
        stores[source] = TokenStore([next(prefixes) for _ in range(number)])
    return stores


class TokenStore:
    """One or more shards, given by their prefixes; safe for many threads.

    Opening reads one small file per shard (30 µs each). A shard's files are mapped when it is first read; the
    `open_shards` used last stay mapped. Prefixes may be URLs, read through a `cache` of whole shards on this machine.
    `fingerprint` depends on the tokens, the document lengths and the mask alone. `text_bytes` is the size of the text
    in UTF-8, from which bits per byte are computed.
    """

    def __init__(
        self,
        prefixes: str | Path | Sequence[str],
        cache: ShardCache | None = None,
        infos: Sequence[StoreInfo] | None = None,
        open_shards: int = _OPEN_SHARDS,
    ) -> None:
        self.prefixes = [str(prefixes)] if isinstance(prefixes, (str, Path)) else [str(prefix) for prefix in prefixes]
        self.infos = list(infos) if infos is not None else [read_info(prefix) for prefix in self.prefixes]
        self.cache, self._open_shards = cache, open_shards
        check_tokenizers(self.prefixes, self.infos)
        content = StoreContent()
        for prefix, info in zip(self.prefixes, self.infos, strict=True):
            content.join(StoreContent(info.fingerprint, info.documents))
            if cache:
                cache.check_limit(prefix, info)
        self.fingerprint = content.hexdigest()
        self.vocab = self.infos[0].vocab if self.infos else 0
        self.tokenizer_fingerprint = self.infos[0].tokenizer_fingerprint if self.infos else ""
        self.dtype = token_dtype(self.vocab)
        self.text_bytes = sum(info.text_bytes for info in self.infos)
        self.masked = any("mask" in info.sizes for info in self.infos)
        self._token_starts = _starts(info.tokens for info in self.infos)
        self._document_starts = _starts(info.documents for info in self.infos)
        self._target_starts = _starts(info.kept for info in self.infos)
        self.tokens, self.documents = int(self._token_starts[-1]), int(self._document_starts[-1])
        self._opened: OrderedDict[int, tuple[Shard, Lease | None]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.tokens

    @property
    def files(self) -> list[str]:
        """The paths that the documents came from, each once. Opens every shard."""
        return list(dict.fromkeys(path for k in range(len(self.prefixes)) for path in self.shard(k).files))

    @property
    def verifiable(self) -> bool:
        """Whether reads are compared with digests: False where an earlier version wrote a shard."""
        return all(CHUNKS in info.sizes for info in self.infos)

    def shard(self, number: int) -> Shard:
        """One of the shards, open; a remote one is fetched first."""
        with self._lock:
            if number in self._opened:
                self._opened.move_to_end(number)
                shard, lease = self._opened[number]
                if lease:
                    lease.touch()
                return shard
        shard, lease = self._open(number)
        with self._lock:
            if not (lease and lease.released):
                self._opened[number] = shard, lease
            while len(self._opened) > self._open_shards:
                self._opened.popitem(last=False)  # its readers keep the maps alive
        return shard

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop): a view of the file if they are in one shard."""
        start, stop, _ = slice(start, stop).indices(self.tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        _, shards, local, lengths = self._segments(np.array([start]), np.array([stop - start]))
        parts = [self.shard(k).slice(a, a + n) for k, a, n in _each(shards, local, lengths)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def gather(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Row i holds the `length` tokens from `starts[i]` on."""
        starts = np.asarray(starts, dtype=np.int64)
        self._check_runs(starts, length)
        if starts.size:
            k, last = self._shard_of(np.array([starts.min(), starts.max() + length - 1])).tolist()
            if k == last:
                return self.shard(k).gather(starts - self._token_starts[k], length)
        out = np.empty((starts.size, length), self.dtype)
        lengths = np.full(starts.shape, length)
        self.copy_runs(starts, lengths, out.reshape(-1), np.arange(starts.size) * length)
        return out

    def weights(self, starts: Ints, length: int) -> Floats | None:
        """The weights, 0 or 1, of `gather`'s tokens as targets; None when no shard has a mask."""
        if not self.masked:
            return None
        out = np.empty((starts.size, length), np.float32)
        lengths = np.full(starts.shape, length)
        self.copy_weights(starts, lengths, out.reshape(-1), np.arange(starts.size) * length)
        return out

    def copy_runs(self, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints, spill: bool = False) -> None:
        """Copies the `lengths[i]` tokens from `starts[i]` on to `out[at[i]:]`; `out` is flat. With `spill`, which
        needs rising `at`, the gaps between the runs in `out` may be overwritten, and copying is faster."""
        shards, local, lengths, at = self._cut_runs(starts, lengths, at)
        if _are_long(lengths):
            for k, start, length, to in _each(shards, local, lengths, at):
                out[to : to + length] = self.shard(k).slice(start, start + length)
        else:
            for k, at_shard in _groups(shards):
                shard, alone = self.shard(k), isinstance(at_shard, slice)
                shard.check_tokens(local[at_shard], lengths[at_shard])
                _copy_by_index(shard.tokens_at, local[at_shard], lengths[at_shard], out, at[at_shard], spill and alone)

    def copy_weights(self, starts: Ints, lengths: Ints, out: Floats, at: Ints, spill: bool = False) -> None:
        """The same for the weights of the tokens as targets, 0 or 1."""
        shards, local, lengths, at = self._cut_runs(starts, lengths, at)
        if _are_long(lengths):
            for k, start, length, to in _each(shards, local, lengths, at):
                shard = self.shard(k)
                shard.check_mask(np.array([start]), length)
                out[to : to + length] = shard.run_weights(start, length)
        else:
            for k, at_shard in _groups(shards):
                shard, alone = self.shard(k), isinstance(at_shard, slice)
                shard.check_mask(local[at_shard], lengths[at_shard])
                _copy_by_index(shard.weights_at, local[at_shard], lengths[at_shard], out, at[at_shard], spill and alone)

    def targets_before(self, positions: Ints) -> Ints:
        """How many tokens before each position count as targets: a lookup, not a scan."""
        if not self.masked:
            return positions
        shards = self._shard_of(np.minimum(positions, self.tokens - 1))
        local = positions - self._token_starts[shards]
        targets = self._target_starts[shards] + local
        for k, at in _groups(shards):
            if "mask" in self.infos[k].sizes:
                targets[at] += self.shard(k).targets_before(local[at]) - local[at]
        return targets

    def scores(self, documents: Ints) -> Floats:
        """The documents' scores; NaN where a document has none."""
        scores = np.full(documents.shape, np.nan, np.float32)
        for k, at in _groups(self._shard_with(documents)):
            if "scores" in self.infos[k].sizes:
                scores[at] = self.shard(k).scores(documents[at] - self._document_starts[k])
        return scores

    @property
    def fields(self) -> dict[str, tuple[str, int]]:
        """The fields' numpy types, and numbers per document; 0: one for each token."""
        return self.infos[0].fields if self.infos else {}

    def document_field(self, name: str, documents: Ints) -> npt.NDArray[Any]:
        """(n, width) the field of some documents."""
        dtype, width = self.fields[name]
        values = np.empty((documents.size, width), dtype)
        for k, at in _groups(self._shard_with(documents)):
            values[at] = self.shard(k).field(name)[documents[at] - self._document_starts[k]]
        return values

    def copy_field(self, name: str, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        """Copies a field of runs of tokens, each within a document, to positions of a flat array."""
        for k, run in _groups(self._shard_of(starts)):
            values, first = self.shard(k).field(name), self._token_starts[k]
            for start, length, place in zip(starts[run], lengths[run], at[run], strict=True):
                out[place : place + length] = values[start - first : start - first + length]

    def document_of(self, positions: Ints) -> Ints:
        """The document that holds each token."""
        positions = np.asarray(positions, dtype=np.int64)
        self._check_runs(positions, 1)
        shards = self._shard_of(positions)
        local, documents = positions - self._token_starts[shards], self._document_starts[shards]
        for k, at in _groups(shards):
            documents[at] += self.shard(k).document_of(local[at])
        return documents

    def documents_in(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """For each window of tokens: its first document, how many more begin inside it, and (flat) where."""
        self._check_runs(starts, lengths)
        window, shards, local, cut = self._segments(starts, lengths)
        if shards.size and (shards == shards[0]).all():
            k = int(shards[0])
            first, more, inner = self.shard(k).documents_in(local, cut)
            return first + self._document_starts[k], more, inner + self._token_starts[k]
        # One window at a time: mostly each is in another shard, so arrays would hold hardly more than one.
        leads = np.diff(window, prepend=-1) > 0
        first, begun = np.empty_like(local), [np.empty(0, np.int64)]
        segments = zip(shards.tolist(), local.tolist(), (local + cut).tolist(), leads.tolist(), strict=True)
        for i, (k, begin, end, leading) in enumerate(segments):
            document, inner = self.shard(k).begins_in(begin, end)
            first[i] = document + self._document_starts[k]
            if not leading:  # the window continues into this shard, whose first document begins inside it
                inner = np.concatenate([[begin], inner])
            begun.append(inner + self._token_starts[k])
        counts = np.array([inner.size for inner in begun[1:]], np.int64)
        more = np.bincount(window, weights=counts, minlength=starts.size).astype(np.int64)
        return first[leads], more, np.concatenate(begun)

    def extents(self, documents: Ints) -> tuple[Ints, Ints]:
        """Each document's tokens, as [start, stop)."""
        shards = self._shard_with(documents)
        starts, stops = self._token_starts[shards], self._token_starts[shards]
        local = documents - self._document_starts[shards]
        for k, at in _groups(shards):
            begin, end = self.shard(k).extents(local[at])
            starts[at] += begin
            stops[at] += end
        return starts, stops

    def edges(self, first: int, stop: int) -> Ints:
        """The starts of documents [first, stop), and the end of the last."""
        k, last = self._shard_with(np.array([first, max(first, stop - 1)])).tolist()
        parts = []
        while k <= last:
            begin, end = self._document_starts[k : k + 2].tolist()
            inside = self.shard(k).edges(max(first, begin) - begin, min(stop, end) - begin)
            parts.append((inside if k == last else inside[:-1]) + self._token_starts[k])
            k += 1
        return np.concatenate(parts)

    def origin_of_document(self, document: int) -> Origin:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document}, but the store has {self.documents}")
        k = int(self._shard_with(np.array([document]))[0])
        first, tokens = int(self._document_starts[k]), int(self._token_starts[k])
        local = self.shard(k).origin_of_document(document - first)
        return Origin(local.file, local.row, local.document_id, document, local.start + tokens, local.stop + tokens)

    def prefetch(self, starts: Ints, lengths: Ints) -> None:
        """Fetches the shards of tokens that will be read soon, in the background; nothing for a local store."""
        if self.cache and starts.size:
            _, shards, _, _ = self._segments(starts, lengths)
            wanted = [k for k in dict.fromkeys(shards.tolist()) if k not in self._opened]
            self.cache.prefetch([(self.prefixes[k], self.infos[k]) for k in wanted])

    def _open(self, number: int) -> tuple[Shard, Lease | None]:
        prefix, info = self.prefixes[number], self.infos[number]
        while self.cache:
            lease = self.cache.fetch(prefix, info, self._close, number)
            try:
                shard = Shard(lease.prefix, info)
                shard.map_all()
                return shard, lease
            except (UserError, OSError):
                if not lease.released:  # else it was evicted at this moment: fetch it again
                    raise
        return Shard(prefix, info), None

    def _close(self, number: int) -> None:
        with self._lock:
            self._opened.pop(number, None)

    def _shard_of(self, positions: Ints) -> Ints:
        """The shard of each token; empty shards hold none."""
        return np.searchsorted(self._token_starts, positions, side="right") - 1

    def _shard_with(self, documents: Ints) -> Ints:
        return np.searchsorted(self._document_starts, documents, side="right") - 1

    def _segments(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Windows cut at shard boundaries: (window, shard, first token in the shard, length) of each piece."""
        first = self._shard_of(starts)
        spread = self._shard_of(starts + lengths - 1) - first
        window = np.arange(starts.size)
        if not spread.any():
            return window, first, starts - self._token_starts[first], lengths
        window, shards = np.repeat(window, spread + 1), run_indices(first, spread + 1)
        begin = np.maximum(starts[window], self._token_starts[shards])
        end = np.minimum((starts + lengths)[window], self._token_starts[shards + 1])
        real = end > begin  # some shards may be empty
        return window[real], shards[real], (begin - self._token_starts[shards])[real], (end - begin)[real]

    def _cut_runs(self, starts: Ints, lengths: Ints, at: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Runs cut at shard boundaries: (shard, start in it, length, offset in the output) of each piece."""
        self._check_runs(starts, lengths)
        window, shards, local, cut = self._segments(starts, lengths)
        return shards, local, cut, at[window] + local + self._token_starts[shards] - starts[window]

    def _check_runs(self, starts: Ints, lengths: Ints | int) -> None:
        if starts.size and (starts.min() < 0 or (starts + lengths).max() > self.tokens):
            most = np.max(lengths)
            raise IndexError(f"{most} tokens from {starts.min()}..{starts.max()}, but the store has {self.tokens}")


def _starts(sizes: Any) -> Ints:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _groups(shards: Ints) -> Iterator[tuple[int, Ints | slice]]:
    """Each shard with its indices in the array; a slice if that is all of them."""
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


def _are_long(lengths: Ints) -> bool:
    return bool(lengths.sum() >= _LONG_RUN * lengths.size)


def _copy_by_index(
    read: Callable[[Ints], npt.NDArray[Any]], starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints, spill: bool
) -> None:
    """Copies runs with an index for every item: for short runs, where one copy each costs more (27 against 5 ns a token
    at 20 tokens). It takes some thousand items at a time, whose indices stay in the processor's cache (else 9 ns).
    Runs without gaps are written as one, so with `spill` each is extended to the start of the next."""
    if spill:
        lengths = np.diff(at, append=at[-1:] + lengths[-1:])
    for first, stop, begin, end in length_chunks(lengths, _INDEX_ITEMS):
        these = slice(first, stop)
        values, to = read(run_indices(starts[these], lengths[these])), int(at[first])
        if at[stop - 1] + lengths[stop - 1] - to == end - begin:
            out[to : to + end - begin] = values
        else:
            out[run_indices(at[these], lengths[these])] = values


def length_chunks(lengths: Ints, cells: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of neighbours with about `cells` cells together, or one with more: (first, stop, cells before first, cells
    before stop)."""
    if not lengths.size:
        return
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    if total <= cells:
        yield 0, lengths.size, 0, total
        return
    cuts = np.searchsorted(ends, np.arange(cells, total, cells), side="right").tolist()
    begin = 0
    for first, stop in pairwise([0, *cuts, lengths.size]):
        if first < stop:
            end = int(ends[stop - 1])
            yield first, stop, begin, end
            begin = end
