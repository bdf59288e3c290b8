"""From links between documents to clusters, and from clusters to rulings: union-find over a file. Documents are
numbers from 0 in the order of the corpus. Parents lie in a mapped file, links are taken in blocks by numpy, and the
root of a cluster is always its first document, so the outcome does not depend on the links' order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.places import Places, unpack
from bessemer.data.dedup.shuffle import load_columns, numbering
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Drop, Ints, Outcome

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
