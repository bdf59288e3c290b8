"""New tokens for a domain: a BPE tokenizer goes on merging where its training stopped, on other text. The merges are
added behind those it has, so text is first encoded as before and then shortened: nothing that the old tokens could
write is lost, and old ids keep their meaning. `initial_rows` makes the embedding's new rows."""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.tokenizer import Tokenizer
from bessemer.data.vocabulary.audit import Fertility, fertility
from bessemer.errors import UserError

Pair = tuple[int, int]

_WORD = re.compile("▁*[^▁]+|▁+")  # for tokenizers that see a whole text as one word
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass
class Extension:
    """A tokenizer with new tokens, most useful first, and what the sample costs without and with them."""

    tokenizer: Tokenizer
    tokens: list[str]  # as text; what is no whole character shows as U+FFFD
    saved: list[int]  # tokens of the sample that each merge saved when it was chosen
    before: Fertility
    after: Fertility


def extend(tokenizer: Tokenizer, texts: Iterable[str], new_tokens: int, min_count: int = 2) -> Extension:
    """At most `new_tokens` learned from the texts, each from a pair that occurs `min_count` times or more. Same
    texts, same tokens. The sample is held in memory. Only for BPE: another model has no merges to go on from."""
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
    """The embedding (or output) matrix for the new tokenizer: old rows as they are, and for a new token the mean of
    the rows of the pieces that the old tokenizer writes it with. A mean is shorter than its parts; `match_norm` gives
    it the mean length of the old rows. Rows of the matrix above the old vocabulary (padding) are not taken over."""
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
        # A special token's name is text to the old tokenizer; any other token is what its model sees.
        pieces = old.encode(name) if i in special else [part.id for part in old.inner.model.tokenize(name)]
        mean = matrix[pieces].astype(np.float64).mean(axis=0)
        if match_norm and np.any(mean):
            mean *= length / np.linalg.norm(mean)
        rows[i] = mean.astype(matrix.dtype)
    return rows


def _words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[tuple[int, ...]]:
    """How often each word occurs, as the ids it has now; words of one token are left out."""
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
    """The merges, and how many tokens each saves. Ties go to the lower ids, so the result is always the same."""
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
            continue  # the count has changed since, and stands in the queue as it is now
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
        here = tuple(ids[place : place + 2]) == pair
        merged.append(new if here else ids[place])
        place += 2 if here else 1
    return merged


def _with_merges(definition: dict[str, Any], merges: list[tuple[str, str]], first_id: int) -> Any:
    """The tokenizer with merges behind its own. Ids go on above all others, those of special tokens too."""
    from tokenizers import Tokenizer as Inner

    model = definition["model"]
    vocab = dict(model["vocab"])
    # Added tokens are numbered behind the model's: they have to stand in it, or new tokens would move them.
    for token in definition["added_tokens"]:
        vocab.setdefault(token["content"], token["id"])
    for number, (left, right) in enumerate(merges):
        vocab[left + right] = first_id + number
    model = {**model, "vocab": vocab, "merges": [*model["merges"], *map(list, merges)]}
    return Inner.from_str(json.dumps({**definition, "model": model}))
