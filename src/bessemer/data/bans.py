"""Where the documents of an exclusion list lie in this run's sources: a list names file and row, a stream bans
(source, document index), and every store numbers its documents anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from bessemer.data.best_fit import BestFitRows
from bessemer.data.concat import ConcatRows
from bessemer.data.exclude import Exclusion
from bessemer.data.pad import PadRows
from bessemer.data.rows import Ints, Rows
from bessemer.data.shards import ShardedStore
from bessemer.data.store import TokenStore
from bessemer.data.string_table import Strings

_SCANNED = 1 << 20  # origins held at once: 20 MB

ByFile = Mapping[str, list[Exclusion]]
Found = tuple[str, Ints, Ints, bool]  # a file, some of its documents, the row of each, whether it was searched


def banned_documents(
    entries: Iterable[Exclusion], rows_by_source: Mapping[str, Rows]
) -> tuple[set[tuple[str, int]], list[str]]:
    """(source, document index) of every entry, in each source that holds it, whatever the source is called; and a
    line for every stale entry, which bans nothing: its file or row is not in this data, or another text is. Sources
    that are tokenized on the fly are not searched: there a document is found while the files are the same.

    Reads the table of files of every shard, and 20 bytes a document of those that hold an accused file: half a second
    for a million of either.
    """
    by_file: dict[str, list[Exclusion]] = defaultdict(list)
    for entry in dict.fromkeys(entries):
        by_file[entry.file].append(entry)
    banned: set[tuple[str, int]] = set()
    found: set[Exclusion] = set()
    why: dict[Exclusion, str] = {}
    for name, rows in rows_by_source.items():
        for file, documents, numbers, searched in _places(name, rows, by_file):
            by_row: dict[int, list[Exclusion]] = defaultdict(list)
            for entry in by_file[file]:
                if entry.row is None and searched:
                    banned.update((name, document) for document in documents.tolist())
                    found.add(entry)
                elif entry.row is not None:
                    by_row[entry.row].append(entry)
                    why.setdefault(entry, "no training document is in that row")
            asked = np.isin(numbers, np.array(list(by_row), np.int64))
            for document, row in zip(documents[asked].tolist(), numbers[asked].tolist(), strict=True):
                now = rows.origin_of_document(document).document_id
                for entry in by_row[row]:
                    if entry.document_id in ("", now):
                        banned.add((name, document))
                        found.add(entry)
                    else:
                        why[entry] = "another text is in that row now"
    stale = [entry for group in by_file.values() for entry in group if entry not in found]
    absent = "not found in this data"
    return banned, [f"{entry.place}: {why.get(entry, absent)}; it is not excluded" for entry in stale]


def _places(name: str, rows: Rows, by_file: ByFile) -> Iterator[Found]:
    store = rows.store if isinstance(rows, (ConcatRows, BestFitRows, PadRows)) else None
    if isinstance(store, TokenStore):
        yield from _in_store(store, 0, by_file)
    elif isinstance(store, ShardedStore) and not store.far:
        first = 0
        for k, about in enumerate(store.abouts):
            yield from _in_store(store.shard(k), first, by_file)
            first += about.documents
    else:  # rows made on the fly, or shards that lie afar: to search them is to read or fetch them all
        yield from _by_index(name, rows, by_file)


def _in_store(store: TokenStore, first: int, by_file: ByFile) -> Iterator[Found]:
    """The documents of the accused files; `first` is the number of the store's first document."""
    numbers = find_strings(store._files, by_file)
    accused = np.zeros(store.about.files, np.bool_)
    accused[list(numbers)] = True
    for start in range(0, store.documents, _SCANNED) if numbers else ():
        origins = store.origins_of(start, min(start + _SCANNED, store.documents))
        at = np.flatnonzero(accused[origins["file"]])
        files, rows = origins["file"][at], origins["row"][at].astype(np.int64)
        for number in np.unique(files).tolist():
            mine = files == number
            yield numbers[number], first + start + at[mine], rows[mine], True


def find_strings(table: Strings, wanted: Iterable[str]) -> dict[int, str]:
    """The numbers that these strings have in a table. Eight bytes at a time are compared, from the end on, where paths
    differ most, for all strings of one length together: a source tree has as many files as documents."""
    by_length: dict[int, list[bytes]] = defaultdict(list)
    for text in wanted:
        data = text.encode("utf-8", "surrogatepass")
        by_length[len(data)].append(data)
    lengths, found = np.diff(table.offsets), dict[int, str]()
    for length, group in by_length.items():
        at = np.flatnonzero(lengths == length)
        for stop in range(length, 0, -8):
            key = np.zeros(at.size, np.uint64)
            for k in range(max(0, stop - 8), stop):
                key = key << np.uint64(8) | table.text[table.offsets[at] + k]
            keys = [int.from_bytes(data[max(0, stop - 8) : stop], "big") for data in group]
            at = at[np.isin(key, np.array(keys, np.uint64))]
        found |= {number: table[number] for number in at.tolist() if table[number].encode() in group}
    return found


def _by_index(name: str, rows: Rows, by_file: ByFile) -> Iterator[Found]:
    """Looks only where the list says that the document was."""
    for file, group in by_file.items():
        for entry in group:
            if entry.source != name or entry.document is None or entry.row is None:
                continue
            try:
                origin = rows.origin_of_document(entry.document)
            except IndexError:
                continue
            if (origin.file, origin.row) == (file, entry.row):
                yield file, np.array([entry.document]), np.array([entry.row]), False
