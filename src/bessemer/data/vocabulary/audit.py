"""How well a tokenizer fits a body of text: tokens per word in each group, tokens that are never used or reached. A
tokenizer trained on other text shows here: many tokens a word, many single bytes, many ids that no text uses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.tokenizer import Tokenizer

_PIECE_CHARS = 1 << 17
_BATCH_CHARS = 1 << 19
_SHOWN = 50  # tokens named in a list; counts are always of all

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint32]


@dataclass
class Fertility:
    """What a group's text costs. A word is what white space divides."""

    group: str
    documents: int = 0
    words: int = 0
    text_bytes: int = 0
    tokens: int = 0
    byte_tokens: int = 0  # tokens for one byte, or part of a character
    unknown_tokens: int = 0
    failures: int = 0  # documents, or pieces of long ones, that do not come back as they were

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
class Audit:
    """The result: a row for each group and for all, and lists of tokens by [id, text] that deserve a look."""

    vocab: int
    groups: list[Fertility]
    unused: int
    unused_tokens: list[tuple[int, str]]
    unreachable: int
    unreachable_tokens: list[tuple[int, str]]
    fragments: int  # tokens that are no whole characters
    same_text: list[list[int]]  # ids that decode to one text
    variants: int  # tokens that differ from another by case or a leading space alone
    longest_tokens: list[tuple[int, str]]
    counts: Counts = field(repr=False)  # how often each id came up

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
        about: dict[str, Any] = {name: value for name, value in asdict(self).items() if name != "counts"}
        for row, shown in zip(self.groups, about["groups"], strict=True):
            rates = ("tokens_per_word", "bytes_per_token", "byte_share")
            shown |= {name: getattr(row, name) for name in rates}
        return json.dumps(about, ensure_ascii=False, indent=1)


def audit(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> Audit:
    """Encodes and decodes every (group, text); memory is bounded by a batch and by the number of groups. The last row
    is for all groups. Tokens are judged unused by this text alone: give a fair sample."""
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
    # Whether a token's own text is encoded as the token; of parts of characters nothing can be said.
    texts_of = {i: own for i in ordinary if (own := tokens[i]) is not None and not fragment[i]}
    lost = [i for i, text in texts_of.items() if tokenizer.encode_batch([text], [True])[0] != [i]]
    whole = list(texts_of)
    by_text: dict[str, list[int]] = {}
    by_stem: dict[str, int] = {}
    for i, text in texts_of.items():
        by_text.setdefault(text, []).append(i)
    for text in by_text:
        stem = text.strip().casefold() or text
        by_stem[stem] = by_stem.get(stem, 0) + 1
    return Audit(
        vocab=tokenizer.vocab_size,
        groups=[*groups.values(), _total(groups.values())],
        unused=len(unused),
        unused_tokens=_named(unused, tokens),
        unreachable=len(lost),
        unreachable_tokens=_named(lost, tokens),
        fragments=int(fragment.sum()),
        same_text=[ids for ids in by_text.values() if len(ids) > 1][:_SHOWN],
        variants=sum(count - 1 for count in by_stem.values()),
        longest_tokens=_named(sorted(whole, key=lambda i: (-len(texts_of[i]), i))[:20], tokens),
        counts=counts,
    )


def fertility(tokenizer: Tokenizer, texts: Iterable[str], group: str = "all") -> Fertility:
    """The row of one group, without a look at the vocabulary."""
    row = Fertility(group)
    for _, text, ids, continues in _encoded(tokenizer, ((group, text) for text in texts)):
        _count(row, text, ids, continues)
    return row


def token_texts(tokenizer: Tokenizer) -> list[str | None]:
    """What each id decodes to by itself; None for ids that stand for nothing."""
    known = set(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    every = range(tokenizer.vocab_size)
    return [tokenizer.decode([i], continues=True) if i in known else None for i in every]


def is_fragment(tokenizer: Tokenizer, token_id: int, text: str | None) -> bool:
    """Whether a token is no whole character: a byte, or part of a character's bytes."""
    name = tokenizer.inner.id_to_token(token_id) or ""
    is_byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
    return is_byte or (text is not None and "\ufffd" in text and "\ufffd" not in name)


def _count(row: Fertility, text: str, ids: Ids, continues: bool) -> None:
    row.documents += not continues
    row.words += len(text.split())
    row.text_bytes += len(text.encode())
    row.tokens += ids.size


def _encoded(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, Ids, bool]]:
    """Group, text, ids and whether it goes on from the one before: long texts come in pieces."""
    batch: list[tuple[str, str, bool]] = []
    chars = 0

    def encode() -> Iterator[tuple[str, str, Ids, bool]]:
        found = tokenizer.encode_arrays([text for _, text, _ in batch], [later for _, _, later in batch])
        for (group, text, later), ids in zip(batch, found, strict=True):
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
    found = tokenizer.inner.token_to_id(name)
    return -1 if found is None else found


def _named(ids: list[int], tokens: list[str | None]) -> list[tuple[int, str]]:
    return [(i, tokens[i] or "") for i in ids[:_SHOWN]]


def _total(rows: Iterable[Fertility]) -> Fertility:
    total = Fertility("all")
    for row in rows:
        for name, count in asdict(row).items():
            if name != "group":
                setattr(total, name, getattr(total, name) + count)
    return total
