"""Evaluation sets as an index of n-grams: which words of a document stand in which item."""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.clean.model_file import file_identity
from bessemer.data.dedup.folding import word_spans
from bessemer.data.dedup.shingles import shingles
from bessemer.data.dedup.shuffle import begins
from bessemer.data.read.rows import repaired
from bessemer.data.step import Ints
from bessemer.errors import UserError
from bessemer.spec.clean.dedup import DecontaminateSpec, EvaluationSetSpec

Words = npt.NDArray[np.uint64]
_JSON = (".jsonl", ".ndjson")
_TEXT = (".txt", ".md")
_ITEMS_AT_ONCE = 1024


class Item(NamedTuple):
    """One row of an evaluation set."""

    set: str
    place: str
    text: str


@dataclass(frozen=True)
class Index:
    """All n-grams of all sets. Gram g stands in the items `item[start[g]:start[g + 1]]`, first from their words
    `word[start[g]:start[g + 1]]` on."""

    grams: Words  # sorted, each once
    start: Ints
    item: Ints
    word: Ints
    sets: tuple[str, ...]
    set_of_item: Ints
    place_of_item: tuple[str, ...]
    too_short: Ints  # items with fewer words than an n-gram
    common: int  # n-grams left out because they stand in too many items
    near: npt.NDArray[np.bool_]  # by the leading bits of a hash: whether any gram begins with them

    def word_in(self, gram: int, item: int) -> int:
        """From which word of an item on one of its grams stands there."""
        some = slice(int(self.start[gram]), int(self.start[gram + 1]))
        return int(self.word[some][np.searchsorted(self.item[some], item)])

    def find(self, hashes: Words) -> tuple[Ints, Ints]:
        """(which of the hashes are known, their grams). The table spares most of them the search."""
        if not self.grams.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        shift = np.uint64(65 - self.near.size.bit_length())
        maybe = np.flatnonzero(self.near[(hashes >> shift).astype(np.int64)])
        at = np.searchsorted(self.grams, hashes[maybe])
        at[at == self.grams.size] = 0
        known = self.grams[at] == hashes[maybe]
        return maybe[known], at[known]


def files_of(sets: Mapping[str, EvaluationSetSpec]) -> dict[str, list[str]]:
    """The files of each set. A set without any is an error: it would pass for one without matches."""
    return {name: [file for path in one.path for file in _expand(name, path)] for name, one in sets.items()}


def _expand(name: str, pattern: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(path):
        found = sorted(
            os.path.join(folder, file)
            for folder, _, names in os.walk(path)
            for file in names
            if file.removesuffix(".gz").endswith(_JSON + _TEXT)
        )
    else:
        found = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    if not found:
        raise UserError(f"decontaminate: set {name!r}: no file {path}; correct its path")
    for file in found:
        if not file.removesuffix(".gz").endswith(_JSON + _TEXT):
            raise UserError(
                f"decontaminate: set {name!r}: {file}: the name does not tell the format; "
                "give .jsonl (an object a line) or .txt (an item a line)"
            )
    return found


def content_hash(files: Mapping[str, Sequence[str]]) -> str:
    """Of the names of the sets and all that their files hold."""
    held = [[name, [(path, file_identity(path)) for path in paths]] for name, paths in files.items()]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(held).encode()))


def items(sets: Mapping[str, EvaluationSetSpec]) -> Iterator[Item]:
    """Every item of every set that has any text, in order."""
    files = files_of(sets)
    for name, one in sets.items():
        for file in files[name]:
            for row, text in _rows(name, file, one.fields):
                if text.strip():
                    yield Item(name, f"{file}:{row}", text)


def _rows(name: str, path: str, fields: Sequence[str]) -> Iterator[tuple[int, str]]:
    is_json = path.removesuffix(".gz").endswith(_JSON)
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        for row, line in enumerate(file, 1):
            text = line.decode("utf-8-sig" if row == 1 else "utf-8", errors="replace")
            if not text.strip():
                continue
            yield row, _item_text(f"set {name!r}: {path}:{row}", text, fields) if is_json else text


def _item_text(place: str, line: str, fields: Sequence[str]) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        what = f"decontaminate: {place}: not valid JSON ({error})"
        raise UserError(f"{what}; correct or delete this line") from error
    if fields:
        missing = [field for field in fields if not isinstance(value, dict) or field not in value]
        if missing:
            has = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise UserError(f"decontaminate: {place}: no field {missing[0]!r}; it has {has}: correct `fields`")
        value = [value[field] for field in fields]
    return "\n".join(_strings(value))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield repaired(value)
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


@lru_cache(maxsize=1)
def load_index(spec_json: str, content: str) -> Index:
    """The index of a spec's sets. Kept, since a worker makes the step anew for every part; `content` is the hash of
    the files, so that a changed file is read again."""
    spec = DecontaminateSpec.model_validate_json(spec_json)
    return build_index(list(items(spec.sets)), tuple(spec.sets), spec.ngram, spec.max_items)


def build_index(found: Sequence[Item], sets: tuple[str, ...], n: int, max_items: int | None) -> Index:
    hashes, owner, word = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for at in range(0, len(found), _ITEMS_AT_ONCE):
        texts = [item.text for item in found[at : at + _ITEMS_AT_ONCE]]
        for block in shingles(texts, "word", n, brief=False):
            counts = np.diff(block.starts, append=block.hashes.size)
            hashes.append(block.hashes)
            owner.append(np.repeat(block.documents + at, counts))
            word.append(np.arange(block.hashes.size) - np.repeat(block.starts - block.first, counts))
    gram, item, at_word = np.concatenate(hashes), np.concatenate(owner), np.concatenate(word)
    long = np.zeros(len(found), bool)
    long[item] = True
    order = np.lexsort((at_word, item, gram))
    gram, item, at_word = gram[order], item[order], at_word[order]
    once = begins(gram, item)  # the same gram in the same item counts once
    gram, item, at_word = gram[once], item[once], at_word[once]
    _, start, count = np.unique(gram, return_index=True, return_counts=True)
    often = count > (max_items if max_items is not None else len(found))
    keep = np.repeat(~often, count)
    gram, item, at_word = gram[keep], item[keep], at_word[keep]
    grams, start = np.unique(gram, return_index=True)
    bits = min(max(int(grams.size * 32).bit_length(), 10), 26)
    near = np.zeros(1 << bits, bool)
    near[(grams >> np.uint64(64 - bits)).astype(np.int64)] = True
    return Index(
        grams, np.append(start, gram.size), item, at_word, sets,
        np.array([sets.index(one.set) for one in found], np.int64), tuple(one.place for one in found),
        np.flatnonzero(~long), int(often.sum()), near,
    )  # fmt: skip


def words_of(text: str, word: int, count: int) -> str:
    """Some words of a text as they stand there, on one line."""
    starts, ends = word_spans(text)
    if word >= starts.size:
        return ""
    last = min(word + count, starts.size) - 1
    return " ".join(text[int(starts[word]) : int(ends[last])].split())
