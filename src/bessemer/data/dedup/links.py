"""Documents that share a key are linked: the stage between collecting keys and finding clusters. Every document has
some 64-bit keys (a hash of its text, or one for each band of its MinHash signature), and perhaps 64 bits more to
check. In each group of equal keys all documents are linked to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup import shuffle
from bessemer.data.dedup.clusters import Resolved, settle
from bessemer.data.dedup.places import note_places
from bessemer.data.dedup.shuffle import BucketTask, PartTask, Records, begins, for_buckets, for_parts, numbering
from bessemer.data.document import Document
from bessemer.data.step import Collected, Each, Ints

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
    each: Each,
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
