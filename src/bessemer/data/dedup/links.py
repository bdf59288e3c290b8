"""Documents that share a key are linked: the stage between collecting keys and finding clusters.

Every document has some 64-bit keys (a hash of its text, or one for each band of its MinHash signature), and perhaps
64 bits more to check. In each group of equal keys all documents are linked to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.clusters import Rulings, settle
from bessemer.data.dedup.places import note_places
from bessemer.data.dedup.shuffle import (
    Records,
    bucket_count,
    hash_bounds,
    load_columns,
    numbering,
    read_bucket,
    write_run,
    write_whole,
)
from bessemer.data.document import Document
from bessemer.data.step import Collected, Each

Ints = npt.NDArray[np.int64]
_KEYED = np.dtype([("key", "<u8"), ("document", "<i8")])
_CHECKED = np.dtype([("key", "<u8"), ("document", "<i8"), ("check", "<u8")])
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
        return _CHECKED if self.checked else _KEYED

    def signatures(self, mode: Any) -> npt.NDArray[np.uint64]:
        """File-backed, a row for each document of the corpus; rows never written take no space."""
        shape = (self.documents, self.signature)
        return np.memmap(self.scratch / "signatures", np.uint64, mode, shape=shape)


@dataclass(frozen=True)
class ScatterTask:
    linking: Linking
    part: Collected
    first: int  # number of the part's first document

    @property
    def name(self) -> str:
        return f"keys of part {self.part.part}"


@dataclass(frozen=True)
class LinkTask:
    linking: Linking
    bucket: int

    @property
    def name(self) -> str:
        return f"bucket {self.bucket}"


def about(documents: Sequence[Document], ordinals: Ints, keep: str) -> dict[str, npt.NDArray[Any]]:
    """What `collect` notes of documents beside their keys."""
    arrays = {"ordinal": ordinals, **note_places(documents, ordinals)}
    if keep == "longest":
        arrays["length"] = np.fromiter(
            (len(document.text) for document in documents), np.int64, len(documents)
        )
    return arrays


def resolve_by_keys(
    collected: Sequence[Collected],
    scratch: Path,
    each: Each,
    *,
    keys: int,
    keep: str,
    checked: bool = False,
    signature: int = 0,
    least: float = 0.0,
) -> tuple[Rulings, dict[str, Any]]:
    """Clusters of documents that share any of their `keys` keys. Collected are `ordinal`, `key` (a column for each
    key), the places, and `check`, `signature` and `length` where they are asked for."""
    numbers = numbering(collected)
    dtype = _CHECKED if checked else _KEYED
    total = int(numbers[-1])
    buckets = bucket_count(total * keys, dtype)
    linking = Linking(scratch, len(collected), buckets, checked, signature, total, least)
    if signature and total:
        linking.signatures("w+")
    tasks = [ScatterTask(linking, part, int(numbers[part.part])) for part in collected]
    documents = sum(each(scatter_keys, tasks))
    each(link_bucket, [LinkTask(linking, bucket) for bucket in range(buckets)])
    edges = [_edges(scratch, bucket) for bucket in range(buckets)]
    return settle(collected, scratch, edges, documents, keep)


def scatter_keys(task: ScatterTask) -> int:
    """Writes the run of one part; says how many documents were collected from it."""
    linking = task.linking
    names = [
        "ordinal",
        "key",
        *(["check"] if linking.checked else []),
        *(["signature"] if linking.signature else []),
    ]
    arrays = load_columns(task.part, names)
    if not arrays:
        write_run(linking.scratch, task.part.part, np.empty(0, linking.dtype), hash_bounds(linking.buckets))
        return 0
    keys = arrays["key"].reshape(arrays["ordinal"].size, -1)
    records = np.empty(keys.size, linking.dtype)
    records["key"] = keys.ravel()
    records["document"] = np.repeat(arrays["ordinal"] + task.first, keys.shape[1])
    if linking.checked:
        records["check"] = arrays["check"]
    if linking.signature:
        linking.signatures("r+")[arrays["ordinal"] + task.first] = arrays["signature"]
    write_run(linking.scratch, task.part.part, records, hash_bounds(linking.buckets))
    return int(arrays["ordinal"].size)


def link_bucket(task: LinkTask) -> None:
    """Writes the links inside one bucket. What is held is the bucket, or, where millions share one key, a piece of it
    and the first document of every key."""
    linking = task.linking
    heads = np.empty(0, linking.dtype)
    links = []
    for records in read_bucket(linking.scratch, linking.parts, task.bucket, linking.dtype):
        heads, found = group(np.concatenate([heads, records]) if heads.size else records)
        links.append(_verified(linking, found) if linking.signature else found)
    write_whole(_edges(linking.scratch, task.bucket), links)


def group(records: Records) -> tuple[Records, Ints]:
    """The first document of every key, and a link from it to each other one with that key."""
    checked = "check" in (records.dtype.names or ())
    order = np.lexsort((records["check"], records["key"])) if checked else np.argsort(records["key"])
    new = np.ones(records.size, bool)
    for name in ("key", "check") if checked else ("key",):
        values = records[name][order]
        differ = values[1:] != values[:-1]
        new[1:] = differ if name == "key" else new[1:] | differ
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


def _edges(scratch: Path, bucket: int) -> Path:
    return scratch / f"{bucket:06d}.links"
