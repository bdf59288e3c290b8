"""From keys to clusters of duplicates: links documents that share a key, and keeps one document of each cluster. Every
document has some 64-bit keys (a hash of its text, or one per band of its MinHash signature), and optionally 64 more
bits to check. In each group of equal keys, all documents are linked to the first.

Clusters come from union-find over a mapped file. Documents are numbered from 0 in corpus order, links are processed in
blocks by numpy, and the root of a cluster is always its first document, so the result does not depend on the order of
the links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.dedup import shuffle
from bessemer.data.curate.dedup.shuffle import BucketTask, PartTask, Places, Records, begins, load_columns, numbering
from bessemer.data.curate.step import Arrays, Collected, Drop, Ints, Outcome, RunTasks
from bessemer.data.read.entry import Document

_KEYED = np.dtype([("key", "<u8"), ("document", "<i8")])
CHECKED = np.dtype([("key", "<u8"), ("document", "<i8"), ("check", "<u8")])
_PAIRS_AT_ONCE = 1 << 13  # whose signatures are compared together


@dataclass(frozen=True)
class LinkJob:
    """What all tasks of one linking share."""

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
        """File-backed, one row per document of the corpus; rows never written take no space."""
        shape = (self.documents, self.signature)
        return np.memmap(self.scratch / "signatures", np.uint64, mode, shape=shape)


def describe_documents(documents: Sequence[Document], ordinals: Ints, keep: str) -> dict[str, npt.NDArray[Any]]:
    """What `collect` stores about documents besides their keys."""
    arrays = {"ordinal": ordinals, **shuffle.note_places(documents, ordinals)}
    if keep == "longest":
        arrays["length"] = np.array([len(document.text) for document in documents], np.int64)
    return arrays


def resolve_by_keys(
    collected: Sequence[Collected],
    scratch: Path,
    run_tasks: RunTasks,
    keys: int,
    keep: str,
    *,
    checked: bool = False,
    signature: int = 0,
    least: float = 0.0,
) -> Resolved:
    """Clusters of documents that share any of their `keys` keys. Needs the collected arrays `ordinal`, `key` (one
    column per key), the places, and `check`, `signature` and `length` where requested."""
    total = int(numbering(collected)[-1])
    buckets = shuffle.bucket_count(total * keys, CHECKED if checked else _KEYED)
    job = LinkJob(scratch, len(collected), buckets, checked, signature, total, least)
    if signature and total:
        job.signatures("w+")
    documents = sum(run_tasks(scatter_keys, shuffle.for_parts("keys", job, collected)))
    run_tasks(link_bucket, shuffle.for_buckets("keys", job, buckets))
    return resolve_clusters(collected, scratch, list(map(job.edges, range(buckets))), documents, keep)


def scatter_keys(task: PartTask[LinkJob]) -> int:
    """Writes one part's run and returns the number of its collected documents."""
    job = task.shared
    names = ["ordinal", "key", "check"] if job.checked else ["ordinal", "key"]
    arrays = shuffle.load_columns(task.part, [*names, "signature"] if job.signature else names)
    documents = arrays["ordinal"] + task.first if arrays else np.empty(0, np.int64)
    records = np.empty(arrays["key"].size if arrays else 0, job.dtype)
    if arrays:
        records["key"] = arrays["key"].ravel()
        records["document"] = np.repeat(documents, records.size // max(documents.size, 1))
    if arrays and job.checked:
        records["check"] = arrays["check"]
    if arrays and job.signature:
        job.signatures("r+")[documents] = arrays["signature"]
    shuffle.write_run(job.scratch, task.part.part, records, shuffle.hash_bounds(job.buckets))
    return int(documents.size)


def link_bucket(task: BucketTask[LinkJob]) -> None:
    """Writes the links of one bucket. Holds the bucket or, where millions share one key, a piece of it and the first
    document of every key."""
    link_equal_keys(task.shared, task.bucket)


def link_equal_keys(job: LinkJob, bucket: int) -> Records:
    """As `link_bucket`; returns the first document of every key."""
    heads = np.empty(0, job.dtype)
    links = []
    for records in shuffle.read_bucket(job.scratch, job.parts, bucket, job.dtype):
        heads, new_links = group(np.concatenate([heads, records]) if heads.size else records)
        links.append(_verified(job, new_links) if job.signature else new_links)
    shuffle.write_blocks(job.edges(bucket), links)
    return heads


def group(records: Records) -> tuple[Records, Ints]:
    """The first document of every key, and a link from it to each other document with that key."""
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
    is_other = head != documents
    return heads, np.stack([head[is_other], documents[is_other]], axis=1)


def _verified(job: LinkJob, links: Ints) -> Ints:
    """The links whose documents agree in a large enough share of their signatures."""
    signatures = job.signatures("r")
    verified = []
    for at in range(0, len(links), _PAIRS_AT_ONCE):
        block = links[at : at + _PAIRS_AT_ONCE]
        same = (signatures[block[:, 0]] == signatures[block[:, 1]]).mean(axis=1)
        verified.append(block[same >= job.least])
    return np.concatenate(verified) if verified else links


DecisionsByPart = Iterator[Arrays]
Resolved = tuple[DecisionsByPart, dict[str, Any]]

_BLOCK = 1 << 18  # documents or links at once
_LARGEST = 10  # clusters that the summary shows
_MEMBERS = 3  # dropped documents that it shows of each
_REASONS = {"first": "duplicate of an earlier document", "longest": "duplicate of a document that stays"}


def resolve_clusters(
    collected: Sequence[Collected], scratch: Path, links: Sequence[Path], documents: int, keep: str
) -> Resolved:
    """The decisions of all parts, generated lazily, and the summary. `links` are files of pairs of document numbers;
    `documents` is the number of collected documents."""
    numbers = numbering(collected)
    total = int(numbers[-1])
    if not total:
        nothing: Arrays = {"ordinal": np.empty(0, np.int64)}
        return iter([nothing for _ in collected]), _summary(documents, 0, {}, [])
    places = Places.of(collected, scratch)
    parents = _map_file(scratch / "parents", total)
    for start in range(0, total, _BLOCK):
        parents[start : start + _BLOCK] = np.arange(start, min(start + _BLOCK, total))
    for path in links:
        with open(path, "rb") as file:
            while data := file.read(16 * _BLOCK):
                pairs = np.frombuffer(data, np.int64).reshape(-1, 2)
                unite(parents, pairs[:, 0], pairs[:, 1])
    flatten(parents)
    sizes = _map_file(scratch / "sizes", total)
    for roots, _ in _members(parents, None):
        np.add.at(sizes, roots, 1)
    survivors = _longest(parents, sizes, _lengths(collected, numbers, scratch), scratch) if keep == "longest" else None
    duplicates, largest = _dropped(parents, sizes, survivors, scratch)
    examples = []
    for size, root, members in largest:
        survivor = places.place(root if survivors is None else int(survivors[root]))
        dropped = [places.place(member) for member in members]
        examples.append({"documents": size, "kept": survivor, "dropped": dropped})
    decisions = _decisions_by_part(numbers, places, scratch, duplicates)
    return decisions, _summary(documents, duplicates, _histogram(sizes), examples)


class ClusterDedupStep:
    """The common part of steps that keep one document of each cluster."""

    version = 1
    spec: Any

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, record in find_decided(decisions, ordinals):
            outcomes[i] = Drop(_REASONS[self.spec.keep], shuffle.unpack(decisions, record))
        return outcomes


def find_ranges(decisions: Arrays, ordinals: Ints) -> Iterator[tuple[int, slice]]:
    """As `find_decided`, for decisions with any number of consecutive records per document."""
    ordinals_decided = decisions["ordinal"]
    first, last = np.searchsorted(ordinals_decided, ordinals), np.searchsorted(ordinals_decided, ordinals, side="right")
    for i in np.flatnonzero(last > first).tolist():
        yield i, slice(first[i], last[i])


def keep_or_drop(text: str, least: int, without: str) -> Outcome:
    """What cutting left of a document, or a Drop where it is too little."""
    chars = len(text.strip())
    return Drop(f"too little left without {without}", float(chars)) if chars < least else text


def find_decided(decisions: Arrays, ordinals: Ints) -> Iterator[tuple[int, int]]:
    """The documents that the decisions name, each with its record."""
    ordinals_decided = decisions["ordinal"]
    if ordinals_decided.size:
        at = np.searchsorted(ordinals_decided, ordinals)
        at[at == ordinals_decided.size] = 0
        matching = np.flatnonzero(ordinals_decided[at] == ordinals)
        yield from zip(matching.tolist(), at[matching].tolist(), strict=True)


def unite(parents: Ints, left: Ints, right: Ints) -> None:
    """Joins the clusters of each pair. A root moves under a smaller one, so parents only decrease."""
    while True:
        left, right = _roots(parents, left), _roots(parents, right)
        differs = left != right
        if not differs.any():
            return
        left, right = left[differs], right[differs]
        np.minimum.at(parents, np.maximum(left, right), np.minimum(left, right))


def _roots(parents: Ints, documents: Ints) -> Ints:
    """The roots. Paths shrink to half in each round, so even a chain takes few rounds."""
    while True:
        up = parents[documents]
        above = parents[up]
        if np.array_equal(up, above):
            return up
        parents[documents] = above


def flatten(parents: Ints) -> None:
    """Points every document at its root."""
    for start in range(0, parents.size, _BLOCK):
        _roots(parents, np.arange(start, min(start + _BLOCK, parents.size)))


def _members(parents: Ints, sizes: Ints | None) -> Iterator[tuple[Ints, Ints]]:
    """(root, document) of all documents in clusters, in order; without `sizes`, the roots are left out."""
    for start in range(0, parents.size, _BLOCK):
        root = parents[start : start + _BLOCK]
        inside = root != np.arange(start, start + root.size)
        if sizes is not None:
            inside |= sizes[start : start + root.size] > 0
        yield root[inside], np.flatnonzero(inside) + start


def _lengths(collected: Sequence[Collected], numbers: Ints, scratch: Path) -> Ints:
    lengths = _map_file(scratch / "lengths", int(numbers[-1]))
    for part in collected:
        arrays = load_columns(part, ("ordinal", "length"))
        if arrays:
            lengths[arrays["ordinal"] + numbers[part.part]] = arrays["length"]
    return lengths


def _longest(parents: Ints, sizes: Ints, lengths: Ints, scratch: Path) -> Ints:
    """By root: the first of the cluster's longest documents."""
    best, stays = _map_file(scratch / "best", parents.size), _map_file(scratch / "stays", parents.size)
    for root, document in _members(parents, sizes):
        np.maximum.at(best, root, lengths[document])
    is_set = _map_file(scratch / "taken", parents.size, np.bool_)
    for root, document in _members(parents, sizes):
        longest = lengths[document] == best[root]
        roots, first = np.unique(root[longest], return_index=True)
        new = ~is_set[roots]
        stays[roots[new]] = document[longest][first[new]]
        is_set[roots] = True
    return stays


def _dropped(
    parents: Ints, sizes: Ints, stays: Ints | None, scratch: Path
) -> tuple[int, list[tuple[int, int, list[int]]]]:
    """Writes which documents are dropped and what they duplicate, in order; returns their number and the largest
    clusters: size, root, some dropped documents."""
    top = _largest_clusters(sizes)
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
            is_example = goes & np.isin(root, roots)
            for of, number in zip(root[is_example].tolist(), document[is_example].tolist(), strict=True):
                if len(members[of]) < _MEMBERS:
                    members[of].append(number)
    return count, [(size, root, members[root]) for size, root in top]


def _largest_clusters(sizes: Ints) -> list[tuple[int, int]]:
    """(documents, root) of the largest clusters, largest first, earlier first among equals."""
    best: list[tuple[int, int]] = []
    for start in range(0, sizes.size, _BLOCK):
        block = sizes[start : start + _BLOCK]
        order = np.lexsort((np.arange(block.size), -block))[:_LARGEST]
        best += [(int(block[i]) + 1, int(i) + start) for i in order if block[i]]
        best = sorted(best, key=lambda cluster: (-cluster[0], cluster[1]))[:_LARGEST]
    return best


def _histogram(sizes: Ints) -> dict[str, int]:
    """How many clusters have 2, 3, 4 to 7, 8 to 15, ... documents."""
    counts = np.zeros(64, np.int64)
    pairs = 0
    for start in range(0, sizes.size, _BLOCK):
        block = sizes[start : start + _BLOCK]
        cluster_sizes = block[block > 0] + 1
        pairs += int((cluster_sizes == 2).sum())
        power = np.frexp(cluster_sizes.astype(np.float64))[1] - 1
        counts += np.bincount(power, minlength=64)
    histogram = {"2": pairs, "3": int(counts[1]) - pairs}
    histogram |= {f"{1 << power}-{(2 << power) - 1}": int(counts[power]) for power in range(2, 64)}
    return {name: count for name, count in histogram.items() if count}


def _decisions_by_part(numbers: Ints, places: Places, scratch: Path, duplicates: int) -> DecisionsByPart:
    dropped = _map_file(scratch / "dropped", duplicates, mode="r") if duplicates else np.empty(0, np.int64)
    repeats = _map_file(scratch / "repeats", duplicates, mode="r") if duplicates else np.empty(0, np.int64)
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


def _map_file(path: Path, items: int, dtype: Any = np.int64, mode: Any = "w+") -> npt.NDArray[Any]:
    """A file as an array of zeros. Its pages belong to the file, not to this process."""
    return np.memmap(path, dtype=dtype, mode=mode, shape=(items,)).view(np.ndarray)
