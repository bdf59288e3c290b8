"""`bessemer data audit` and `extend`: how well a tokenizer fits some text, and new tokens for a domain.

`extend` continues the merges of a BPE tokenizer on other text. New merges come after the existing ones, so text is
first encoded as before and then shortened, and old ids keep their meaning. `initial_rows` makes the new rows of an
embedding.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

_PIECE_CHARS = 1 << 17
_BATCH_CHARS = 1 << 19
_SHOWN = 50  # tokens listed; counts include all

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint32]


@dataclass
class Fertility:
    """Tokens per word and per byte of a group of texts. Words are separated by white space."""

    group: str
    documents: int = 0
    words: int = 0
    text_bytes: int = 0
    tokens: int = 0
    byte_tokens: int = 0  # tokens for one byte, or part of a character
    unknown_tokens: int = 0
    failures: int = 0  # documents, or pieces of long ones, that do not round-trip

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / max(1, self.words)

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, self.tokens)

    @property
    def byte_share(self) -> float:
        return self.byte_tokens / max(1, self.tokens)


@dataclass
class TokenizerAudit:
    """A row for each group and for all, and lists of suspicious tokens as [id, text]."""

    vocab: int
    groups: list[Fertility]
    unused: int
    unused_tokens: list[tuple[int, str]]
    unreachable: int
    unreachable_tokens: list[tuple[int, str]]
    fragments: int  # tokens that are not whole characters
    same_text: list[list[int]]  # ids that decode to the same text
    variants: int  # tokens that differ from another only by case or a leading space
    longest_tokens: list[tuple[int, str]]
    counts: Counts = field(repr=False)  # occurrences of each id

    HEADER = ("group", "documents", "tokens/word", "bytes/token", "byte tokens", "unknown", "failures")

    def rows(self) -> list[tuple[str, ...]]:
        """The groups as cells of a table, under HEADER."""
        return [
            (
                row.group, f"{row.documents:,}", f"{row.tokens_per_word:.2f}", f"{row.bytes_per_token:.2f}",
                f"{100 * row.byte_share:.1f} %", f"{row.unknown_tokens:,}", f"{row.failures:,}",
            )
            for row in self.groups
        ]  # fmt: skip

    def to_json(self) -> str:
        content: dict[str, Any] = {name: value for name, value in asdict(self).items() if name != "counts"}
        for row, entry in zip(self.groups, content["groups"], strict=True):
            entry |= {name: getattr(row, name) for name in ("tokens_per_word", "bytes_per_token", "byte_share")}
        return json.dumps(content, ensure_ascii=False, indent=1)


def audit(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> TokenizerAudit:
    """Encodes and decodes every (group, text), in memory bounded by a batch. The last row is for all groups. `unused`
    refers to these texts only: use a representative sample."""
    tokens = token_texts(tokenizer)
    fragment = np.array([is_fragment(tokenizer, i, text) for i, text in enumerate(tokens)])
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    groups: dict[str, Fertility] = {}
    for group, text, ids, continues in _encoded(tokenizer, texts):
        row = groups.setdefault(group, Fertility(group))
        counts += np.bincount(ids, minlength=counts.size)
        _count(row, text, ids, continues)
        row.byte_tokens += int(fragment[ids].sum())
        row.unknown_tokens += int((ids == _unknown_id(tokenizer)).sum())
        row.failures += tokenizer.decode(ids.tolist(), continues) != text
    special = set(tokenizer.special.values())
    ordinary = [i for i in range(counts.size) if i not in special]
    unused = [i for i in ordinary if not counts[i] and tokens[i] is not None]
    # A token is unreachable if its own text is not encoded as the token; unknown for parts of characters.
    texts_of = {i: own for i in ordinary if (own := tokens[i]) is not None and not fragment[i]}
    unreachable = [i for i, text in texts_of.items() if tokenizer.encode_batch([text], [True])[0] != [i]]
    by_text: dict[str, list[int]] = {}
    by_stem: dict[str, int] = {}
    for i, text in texts_of.items():
        by_text.setdefault(text, []).append(i)
    for text in by_text:
        stem = text.strip().casefold() or text
        by_stem[stem] = by_stem.get(stem, 0) + 1
    return TokenizerAudit(
        vocab=tokenizer.vocab_size,
        groups=[*groups.values(), _total(groups.values())],
        unused=len(unused),
        unused_tokens=_named(unused, tokens),
        unreachable=len(unreachable),
        unreachable_tokens=_named(unreachable, tokens),
        fragments=int(fragment.sum()),
        same_text=[ids for ids in by_text.values() if len(ids) > 1][:_SHOWN],
        variants=sum(count - 1 for count in by_stem.values()),
        longest_tokens=_named(sorted(texts_of, key=lambda i: (-len(texts_of[i]), i))[:20], tokens),
        counts=counts,
    )


def fertility(tokenizer: Tokenizer, texts: Iterable[str], group: str = "all") -> Fertility:
    """The row of one group, without the statistics of the vocabulary."""
    row = Fertility(group)
    for _, text, ids, continues in _encoded(tokenizer, ((group, text) for text in texts)):
        _count(row, text, ids, continues)
    return row


def token_texts(tokenizer: Tokenizer) -> list[str | None]:
    """The text of each id by itself; None for unused ids."""
    used = set(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    return [tokenizer.decode([i], continues=True) if i in used else None for i in range(tokenizer.vocab_size)]


def is_fragment(tokenizer: Tokenizer, token_id: int, text: str | None) -> bool:
    """Whether a token is a byte, or part of a character's bytes."""
    name = tokenizer.inner.id_to_token(token_id) or ""
    is_byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
    return is_byte or (text is not None and "\ufffd" in text and "\ufffd" not in name)


def _count(row: Fertility, text: str, ids: Ids, continues: bool) -> None:
    row.documents += not continues
    row.words += len(text.split())
    row.text_bytes += len(text.encode())
    row.tokens += ids.size


def _encoded(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, Ids, bool]]:
    """(group, text, ids, whether it continues the previous text): long texts come in pieces."""
    batch: list[tuple[str, str, bool]] = []
    chars = 0

    def encode() -> Iterator[tuple[str, str, Ids, bool]]:
        encoded = tokenizer.encode_arrays([text for _, text, _ in batch], [later for _, _, later in batch])
        for (group, text, later), ids in zip(batch, encoded, strict=True):
            yield group, text, ids, later

    for group, text in texts:
        for number, piece in enumerate(tokenizer.cut(text, _PIECE_CHARS)):
            batch.append((group, piece, number > 0))
            chars += len(piece)
            if chars >= _BATCH_CHARS:
                yield from encode()
                batch, chars = [], 0
    yield from encode()


def _unknown_id(tokenizer: Tokenizer) -> int:
    name = getattr(tokenizer.inner.model, "unk_token", None) or "<unk>"
    token_id = tokenizer.inner.token_to_id(name)
    return -1 if token_id is None else token_id


def _named(ids: list[int], tokens: list[str | None]) -> list[tuple[int, str]]:
    return [(i, tokens[i] or "") for i in ids[:_SHOWN]]


def _total(rows: Iterable[Fertility]) -> Fertility:
    totals: Counter[str] = Counter()
    for row in rows:
        totals.update({name: count for name, count in asdict(row).items() if name != "group"})
    return Fertility("all", **totals)


Pair = tuple[int, int]

_WORD = re.compile("▁*[^▁]+|▁+")  # for tokenizers that see a whole text as one word
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass
class Extension:
    """A tokenizer with new tokens, most useful first, and the statistics of the sample without and with them."""

    tokenizer: Tokenizer
    tokens: list[str]  # as text; parts of characters show as U+FFFD
    saved: list[int]  # tokens of the sample that each merge saved
    before: Fertility
    after: Fertility


def extend(tokenizer: Tokenizer, texts: Iterable[str], new_tokens: int, min_count: int = 2) -> Extension:
    """Learns at most `new_tokens` from the texts, each from a pair that occurs at least `min_count` times.
    Deterministic; holds the sample in memory. Only for BPE: other models have no merges."""
    inner = tokenizer.inner
    if type(inner.model).__name__ != "BPE":
        kind = type(inner.model).__name__
        raise UserError(f"new tokens can be learned for a BPE tokenizer, not for {kind}; train a new one")
    sample = list(texts)
    definition = json.loads(inner.to_str())
    words = _words(tokenizer, sample)
    merges, saved = _learn(words, definition, tokenizer, new_tokens, min_count)
    names = [left + right for left, right in merges]
    extended = Tokenizer(_with_merges(definition, merges, tokenizer.vocab_size), tokenizer.eos)
    return Extension(
        tokenizer=extended,
        tokens=[extended.decode([tokenizer.vocab_size + i], continues=True) for i in range(len(names))],
        saved=saved,
        before=fertility(tokenizer, sample, "before"),
        after=fertility(extended, sample, "after"),
    )


def initial_rows(
    old: Tokenizer, new: Tokenizer, matrix: npt.NDArray[Any], match_norm: bool = False
) -> npt.NDArray[Any]:
    """The embedding (or output) matrix for the new tokenizer: old rows stay, a new row is the mean of the rows of the
    old pieces of its text. A mean is shorter than its parts; `match_norm` scales it to the mean length of the old rows.
    Rows above the old vocabulary (padding) are dropped."""
    if matrix.ndim != 2 or matrix.shape[0] < old.vocab_size:
        raise ValueError(f"the matrix is {matrix.shape}, but the old tokenizer has {old.vocab_size} ids")
    known = old.inner.get_vocab(with_added_tokens=True)
    rows = np.zeros((new.vocab_size, matrix.shape[1]), matrix.dtype)
    length = np.linalg.norm(matrix[: old.vocab_size].astype(np.float64), axis=1).mean()
    special = {i: name for name, i in new.special.items()}
    for name, i in new.inner.get_vocab(with_added_tokens=True).items():
        if name in known:
            rows[i] = matrix[known[name]]
            continue
        # The old tokenizer sees a special token's name as text; other names are in its model's alphabet.
        pieces = old.encode(name) if i in special else [part.id for part in old.inner.model.tokenize(name)]
        mean = matrix[pieces].astype(np.float64).mean(axis=0)
        if match_norm and np.any(mean):
            mean *= length / np.linalg.norm(mean)
        rows[i] = mean.astype(matrix.dtype)
    return rows


def _words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[tuple[int, ...]]:
    """The count of each word, by its current ids; words of one token are omitted."""
    inner = tokenizer.inner
    counts: Counter[str] = Counter()
    for text in texts:
        text = inner.normalizer.normalize_str(text) if inner.normalizer is not None else text
        first = inner.pre_tokenizer
        parts = [part for part, _ in first.pre_tokenize_str(text)] if first is not None else [text]
        counts.update(word for part in parts for word in (_WORD.findall(part) if "▁" in part else [part]))
    words: Counter[tuple[int, ...]] = Counter()
    for word, count in counts.items():
        ids = tuple(token.id for token in inner.model.tokenize(word))
        if len(ids) > 1:
            words[ids] += count
    return words


def _learn(
    words: Counter[tuple[int, ...]], definition: dict[str, Any], tokenizer: Tokenizer, new_tokens: int, min_count: int
) -> tuple[list[tuple[str, str]], list[int]]:
    """The merges, and the tokens that each saves. Ties go to the lower ids: the result is deterministic."""
    names = {i: name for name, i in definition["model"]["vocab"].items()}
    taken = {*names.values(), *tokenizer.special}
    barred = set(tokenizer.special.values())
    if definition["model"]["byte_fallback"]:
        barred |= {i for i, name in names.items() if _BYTE.fullmatch(name)}
    table = [list(ids) for ids in sorted(words)]
    counts = [words[ids] for ids in sorted(words)]
    pairs: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = {}
    for number, ids in enumerate(table):
        for pair in pairwise(ids):
            pairs[pair] += counts[number]
            places.setdefault(pair, set()).add(number)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    merges: list[tuple[str, str]] = []
    saved: list[int] = []
    while queue and len(merges) < new_tokens:
        negative, pair = heapq.heappop(queue)
        if pairs[pair] != -negative:
            continue  # outdated: the queue has the current count too
        if -negative < min_count:
            break
        if barred & set(pair) or names[pair[0]] + names[pair[1]] in taken:
            continue
        new = tokenizer.vocab_size + len(merges)
        merges.append((names[pair[0]], names[pair[1]]))
        saved.append(0)
        names[new] = names[pair[0]] + names[pair[1]]
        taken.add(names[new])
        changed: set[Pair] = set()
        for number in sorted(places.pop(pair)):
            before, after = table[number], _merge(table[number], pair, new)
            for some, sign in ((before, -1), (after, 1)):
                for neighbour in pairwise(some):
                    pairs[neighbour] += sign * counts[number]
                    changed.add(neighbour)
            for neighbour in pairwise(after):
                places.setdefault(neighbour, set()).add(number)
            table[number] = after
            saved[-1] += counts[number] * (len(before) - len(after))
        for neighbour in changed:
            if pairs[neighbour] > 0:
                heapq.heappush(queue, (-pairs[neighbour], neighbour))
    return merges, saved


def _merge(ids: list[int], pair: Pair, new: int) -> list[int]:
    merged: list[int] = []
    place = 0
    while place < len(ids):
        matches = tuple(ids[place : place + 2]) == pair
        merged.append(new if matches else ids[place])
        place += 2 if matches else 1
    return merged


def _with_merges(definition: dict[str, Any], merges: list[tuple[str, str]], first_id: int) -> Any:
    """The tokenizer with additional merges. Their ids come after all others, including those of special tokens."""
    from tokenizers import Tokenizer as Inner

    model = definition["model"]
    vocab = dict(model["vocab"])
    # Added tokens are numbered after the model's: they must be in it, or new tokens would move them.
    for token in definition["added_tokens"]:
        vocab.setdefault(token["content"], token["id"])
    for number, (left, right) in enumerate(merges):
        vocab[left + right] = first_id + number
    model = {**model, "vocab": vocab, "merges": [*model["merges"], *map(list, merges)]}
    return Inner.from_str(json.dumps({**definition, "model": model}))
