"""Documents that share a key are linked: the stage between collecting keys and finding clusters. Every document has
some 64-bit keys (a hash of its text, or one for each band of its MinHash signature), and perhaps 64 bits more to
check. In each group of equal keys all documents are linked to the first.

From links between documents to clusters, and from clusters to rulings: union-find over a file. Documents are
numbers from 0 in the order of the corpus. Parents lie in a mapped file, links are taken in blocks by numpy, and the
root of a cluster is always its first document, so the outcome does not depend on the links' order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.dedup import shuffle
from bessemer.data.curate.dedup.shuffle import (
    BucketTask,
    PartTask,
    Places,
    Records,
    begins,
    for_buckets,
    for_parts,
    load_columns,
    note_places,
    numbering,
    unpack,
)
from bessemer.data.curate.step import Arrays, Collected, Drop, Ints, Outcome, PerDocumentStep
from bessemer.data.document import Document

_KEYED = np.dtype([("key", "<u8"), ("document", "<i8")])
CHECKED = np.dtype([("key", "<u8"), ("document", "<i8"), ("check", "<u8")])
_PAIRS_AT_ONCE = 1 << 13  # whose signatures are compared together


@dataclass(frozen=True)
class Linking:
    """What the tasks of one linking have in common."""

    scratch: Path
    parts: int
    buckets: int
    checked: bool  # `check` was collected beside `key`
    signature: int = 0  # hashes in a signature, where one was collected to verify by
    documents: int = 0
    least: float = 0.0  # share of equal hashes for a link

    @property
    def dtype(self) -> np.dtype[Any]:
        return CHECKED if self.checked else _KEYED

    def edges(self, bucket: int) -> Path:
        return self.scratch / f"{bucket:06d}.links"

    def signatures(self, mode: Any) -> npt.NDArray[np.uint64]:
        """File-backed, a row for each document of the corpus; rows never written take no space."""
        shape = (self.documents, self.signature)
        return np.memmap(self.scratch / "signatures", np.uint64, mode, shape=shape)


def about(documents: Sequence[Document], ordinals: Ints, keep: str) -> dict[str, npt.NDArray[Any]]:
    """What `collect` notes of documents beside their keys."""
    arrays = {"ordinal": ordinals, **note_places(documents, ordinals)}
    if keep == "longest":
        arrays["length"] = np.array([len(document.text) for document in documents], np.int64)
    return arrays


def resolve_by_keys(
    collected: Sequence[Collected],
    scratch: Path,
    each: PerDocumentStep,
    keys: int,
    keep: str,
    *,
    checked: bool = False,
    signature: int = 0,
    least: float = 0.0,
) -> Resolved:
    """Clusters of documents that share any of their `keys` keys. Collected are `ordinal`, `key` (a column for each
    key), the places, and `check`, `signature` and `length` where they are asked for."""
    total = int(numbering(collected)[-1])
    buckets = shuffle.bucket_count(total * keys, CHECKED if checked else _KEYED)
    linking = Linking(scratch, len(collected), buckets, checked, signature, total, least)
    if signature and total:
        linking.signatures("w+")
    documents = sum(each(scatter_keys, for_parts("keys", linking, collected)))
    each(link_bucket, for_buckets("keys", linking, buckets))
    return settle(collected, scratch, list(map(linking.edges, range(buckets))), documents, keep)


def scatter_keys(task: PartTask[Linking]) -> int:
    """Writes the run of one part; says how many documents were collected from it."""
    linking = task.shared
    names = ["ordinal", "key", "check"] if linking.checked else ["ordinal", "key"]
    arrays = shuffle.load_columns(task.part, [*names, "signature"] if linking.signature else names)
    documents = arrays["ordinal"] + task.first if arrays else np.empty(0, np.int64)
    records = np.empty(arrays["key"].size if arrays else 0, linking.dtype)
    if arrays:
        records["key"] = arrays["key"].ravel()
        records["document"] = np.repeat(documents, records.size // max(documents.size, 1))
    if arrays and linking.checked:
        records["check"] = arrays["check"]
    if arrays and linking.signature:
        linking.signatures("r+")[documents] = arrays["signature"]
    shuffle.write_run(linking.scratch, task.part.part, records, shuffle.hash_bounds(linking.buckets))
    return int(documents.size)


def link_bucket(task: BucketTask[Linking]) -> None:
    """Writes the links inside one bucket. What is held is the bucket, or, where millions share one key, a piece of it
    and the first document of every key."""
    link_equal(task.shared, task.bucket)


def link_equal(linking: Linking, bucket: int) -> Records:
    """As `link_bucket`; the first document of every key."""
    heads = np.empty(0, linking.dtype)
    links = []
    for records in shuffle.read_bucket(linking.scratch, linking.parts, bucket, linking.dtype):
        heads, found = group(np.concatenate([heads, records]) if heads.size else records)
        links.append(_verified(linking, found) if linking.signature else found)
    shuffle.write_whole(linking.edges(bucket), links)
    return heads


def group(records: Records) -> tuple[Records, Ints]:
    """The first document of every key, and a link from it to each other one with that key."""
    columns = [records[name] for name in ("key", "check") if name in (records.dtype.names or ())]
    order = np.lexsort(columns[::-1]) if len(columns) > 1 else np.argsort(columns[0])
    new = begins(*(column[order] for column in columns))
    starts = np.flatnonzero(new)
    heads = records[order[starts]]
    if not starts.size:
        return heads, np.empty((0, 2), np.int64)
    documents = records["document"][order]
    heads["document"] = np.minimum.reduceat(documents, starts)
    head = heads["document"][np.cumsum(new) - 1]
    other = head != documents
    return heads, np.stack([head[other], documents[other]], axis=1)


def _verified(linking: Linking, links: Ints) -> Ints:
    """Those links whose documents agree in a large enough share of their signatures."""
    signatures = linking.signatures("r")
    kept = []
    for at in range(0, len(links), _PAIRS_AT_ONCE):
        some = links[at : at + _PAIRS_AT_ONCE]
        same = (signatures[some[:, 0]] == signatures[some[:, 1]]).mean(axis=1)
        kept.append(some[same >= linking.least])
    return np.concatenate(kept) if kept else links


Rulings = Iterator[Arrays]
Resolved = tuple[Rulings, dict[str, Any]]

_BLOCK = 1 << 18  # documents or links at once
_LARGEST = 10  # clusters that the summary shows
_MEMBERS = 3  # dropped documents that it shows of each
_REASONS = {"first": "duplicate of an earlier document", "longest": "duplicate of a document that stays"}


def settle(collected: Sequence[Collected], scratch: Path, links: Sequence[Path], documents: int, keep: str) -> Resolved:
    """The rulings of all parts, made one by one as they are asked for, and the summary. `links` are files of pairs
    of document numbers; `documents` is how many took part."""
    numbers = numbering(collected)
    total = int(numbers[-1])
    if not total:
        nothing: Arrays = {"ordinal": np.empty(0, np.int64)}
        return iter([nothing for _ in collected]), _summary(documents, 0, {}, [])
    places = Places.of(collected, scratch)
    parents = _map(scratch / "parents", total)
    for start in range(0, total, _BLOCK):
        parents[start : start + _BLOCK] = np.arange(start, min(start + _BLOCK, total))
    for path in links:
        for pairs in _pairs(path):
            unite(parents, pairs[:, 0], pairs[:, 1])
    flatten(parents)
    sizes = _map(scratch / "sizes", total)
    for root, _ in _members(parents, None):
        np.add.at(sizes, root, 1)
    lengths = _lengths(collected, numbers, scratch) if keep == "longest" else None
    stays = _longest(parents, sizes, lengths, scratch) if lengths is not None else None
    duplicates, largest = _dropped(parents, sizes, stays, scratch)
    shown = [
        {
            "documents": size,
            "kept": places.place(root if stays is None else int(stays[root])),
            "dropped": [places.place(member) for member in members],
        }
        for size, root, members in largest
    ]
    rulings = _rulings(numbers, places, scratch, duplicates)
    return rulings, _summary(documents, duplicates, _histogram(sizes), shown)


class OneOfEach:
    """What the steps have in common that keep one document of each cluster, by the rulings that `settle` makes."""

    version = 1
    spec: Any

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, record in ruled(ruling, ordinals):
            outcomes[i] = Drop(_REASONS[self.spec.keep], unpack(ruling, record))
        return outcomes


def cut_ranges(ruling: Arrays, ordinals: Ints) -> Iterator[tuple[int, slice]]:
    """As `ruled`, of rulings with any number of records in a row for one document."""
    named = ruling["ordinal"]
    first, last = np.searchsorted(named, ordinals), np.searchsorted(named, ordinals, side="right")
    for i in np.flatnonzero(last > first).tolist():
        yield i, slice(first[i], last[i])


def left_after(text: str, least: int, without: str) -> Outcome:
    """What cutting left of a document, or that it is too little to keep."""
    chars = len(text.strip())
    return Drop(f"too little left without {without}", float(chars)) if chars < least else text


def ruled(ruling: Arrays, ordinals: Ints) -> Iterator[tuple[int, int]]:
    """Which of the documents a ruling names, each with its record there."""
    named = ruling["ordinal"]
    if named.size:
        at = np.searchsorted(named, ordinals)
        at[at == named.size] = 0
        here = np.flatnonzero(named[at] == ordinals)
        yield from zip(here.tolist(), at[here].tolist(), strict=True)


def unite(parents: Ints, left: Ints, right: Ints) -> None:
    """Joins the clusters of each pair. A root is hung under a smaller one, so parents only ever become smaller."""
    while True:
        left, right = _roots(parents, left), _roots(parents, right)
        apart = left != right
        if not apart.any():
            return
        left, right = left[apart], right[apart]
        np.minimum.at(parents, np.maximum(left, right), np.minimum(left, right))


def _roots(parents: Ints, documents: Ints) -> Ints:
    """The roots; the paths to them shrink on the way, to half in each round, so a chain takes few rounds."""
    while True:
        up = parents[documents]
        above = parents[up]
        if np.array_equal(up, above):
            return up
        parents[documents] = above


def flatten(parents: Ints) -> None:
    """Every document points at its root."""
    for start in range(0, parents.size, _BLOCK):
        _roots(parents, np.arange(start, min(start + _BLOCK, parents.size)))


def _pairs(path: Path) -> Iterator[Ints]:
    with open(path, "rb") as file:
        while data := file.read(16 * _BLOCK):
            yield np.frombuffer(data, np.int64).reshape(-1, 2)


def _members(parents: Ints, sizes: Ints | None) -> Iterator[tuple[Ints, Ints]]:
    """(root, document) of all documents in clusters, in order; without `sizes`, the roots themselves are left out."""
    for start in range(0, parents.size, _BLOCK):
        root = parents[start : start + _BLOCK]
        inside = root != np.arange(start, start + root.size)
        if sizes is not None:
            inside |= sizes[start : start + root.size] > 0
        yield root[inside], np.flatnonzero(inside) + start


def _lengths(collected: Sequence[Collected], numbers: Ints, scratch: Path) -> Ints:
    lengths = _map(scratch / "lengths", int(numbers[-1]))
    for part in collected:
        arrays = load_columns(part, ("ordinal", "length"))
        if arrays:
            lengths[arrays["ordinal"] + numbers[part.part]] = arrays["length"]
    return lengths


def _longest(parents: Ints, sizes: Ints, lengths: Ints, scratch: Path) -> Ints:
    """By root: the first of the longest documents of the cluster."""
    best, stays = _map(scratch / "best", parents.size), _map(scratch / "stays", parents.size)
    for root, document in _members(parents, sizes):
        np.maximum.at(best, root, lengths[document])
    taken = _map(scratch / "taken", parents.size, np.bool_)
    for root, document in _members(parents, sizes):
        longest = lengths[document] == best[root]
        roots, first = np.unique(root[longest], return_index=True)
        new = ~taken[roots]
        stays[roots[new]] = document[longest][first[new]]
        taken[roots] = True
    return stays


def _dropped(
    parents: Ints, sizes: Ints, stays: Ints | None, scratch: Path
) -> tuple[int, list[tuple[int, int, list[int]]]]:
    """Writes who goes and what it repeats, in order; (how many, the largest clusters: size, root, some who go)."""
    top = _top(sizes)
    members: dict[int, list[int]] = {root: [] for _, root in top}
    roots = np.array(sorted(members), np.int64)
    count = 0
    with open(scratch / "dropped", "wb") as dropped, open(scratch / "repeats", "wb") as repeats:
        for root, document in _members(parents, sizes):
            survivor = root if stays is None else stays[root]
            goes = document != survivor
            dropped.write(document[goes].tobytes())
            repeats.write(survivor[goes].tobytes())
            count += int(goes.sum())
            shown = goes & np.isin(root, roots)
            for of, number in zip(root[shown].tolist(), document[shown].tolist(), strict=True):
                if len(members[of]) < _MEMBERS:
                    members[of].append(number)
    return count, [(size, root, members[root]) for size, root in top]


def _top(sizes: Ints) -> list[tuple[int, int]]:
    """(documents, root) of the largest clusters, largest first, earlier ones first among equals."""
    best: list[tuple[int, int]] = []
    for start in range(0, sizes.size, _BLOCK):
        block = sizes[start : start + _BLOCK]
        order = np.lexsort((np.arange(block.size), -block))[:_LARGEST]
        best += [(int(block[i]) + 1, int(i) + start) for i in order if block[i]]
        best = sorted(best, key=lambda one: (-one[0], one[1]))[:_LARGEST]
    return best


def _histogram(sizes: Ints) -> dict[str, int]:
    """How many clusters have 2, 3, 4 to 7, 8 to 15, ... documents."""
    counts = np.zeros(64, np.int64)
    pairs = 0
    for start in range(0, sizes.size, _BLOCK):
        block = sizes[start : start + _BLOCK]
        found = block[block > 0] + 1
        pairs += int((found == 2).sum())
        power = np.frexp(found.astype(np.float64))[1] - 1
        counts += np.bincount(power, minlength=64)
    named = {"2": pairs, "3": int(counts[1]) - pairs}
    named |= {f"{1 << power}-{(2 << power) - 1}": int(counts[power]) for power in range(2, 64)}
    return {name: count for name, count in named.items() if count}


def _rulings(numbers: Ints, places: Places, scratch: Path, duplicates: int) -> Rulings:
    dropped = _map(scratch / "dropped", duplicates, mode="r") if duplicates else np.empty(0, np.int64)
    repeats = _map(scratch / "repeats", duplicates, mode="r") if duplicates else np.empty(0, np.int64)
    bounds = np.searchsorted(dropped, numbers)
    for first, start, stop in zip(numbers[:-1].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield {"ordinal": dropped[start:stop] - first, **places.pack(np.asarray(repeats[start:stop]))}


def _summary(
    documents: int, duplicates: int, histogram: dict[str, int], largest: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "documents": documents,
        "duplicates": duplicates,
        "clusters": sum(histogram.values()),
        "cluster_sizes": histogram,
        "largest_clusters": list(largest),
    }


def _map(path: Path, items: int, dtype: Any = np.int64, mode: Any = "w+") -> npt.NDArray[Any]:
    """A file as an array: zeros when new. Its pages belong to the file, not to this process's own memory."""
    return np.memmap(path, dtype=dtype, mode=mode, shape=(items,)).view(np.ndarray)
