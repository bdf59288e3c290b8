"""Text as a comparison sees it: words in lower case, without accents and punctuation, every number the same. Two
documents that differ only in this are the same document to the fuzzy steps. Folding goes character by character, so
that a word of the folded text can be found again in the text as it is (`word_spans`)."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import numpy as np

from bessemer.data.step import Ints

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_SEPARATOR, _WORD, _NOTHING, _ALONE = range(4)  # what a character is
# Scripts written without spaces. A character of theirs is a word of its own: otherwise a whole sentence would be one.
_SPACELESS = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip


def fold_bytes(text: str) -> bytes:
    """The text in UTF-8 with everything that is not ASCII folded; `LETTERS` does the rest. Costs a copy for ASCII, up
    to 70 ns a character otherwise."""
    raw = text.encode()
    beyond = len(raw) - len(text)
    if not beyond:
        return raw
    # Runs one by one cost 600 ns each and nothing between them; the whole text, 65 ns for every character.
    mostly_ascii = beyond < len(text) / 10
    if mostly_ascii:
        return _NOT_ASCII.sub(lambda run: run[0].translate(_FOLDED), text).encode()
    return text.translate(_FOLDED).encode()


class _Folded(dict[int, str]):
    """What each character becomes, found out when it is first met."""

    def __missing__(self, code: int) -> str:
        kind, letters = _fold(chr(code)) if code > 127 else (_WORD, chr(code))  # ASCII is left to LETTERS
        made = {_SEPARATOR: " ", _NOTHING: "", _WORD: letters, _ALONE: f" {letters} "}[kind]
        self[code] = made
        return made


_FOLDED = _Folded()


def _fold(character: str) -> tuple[int, str]:
    if "가" <= character <= "힣":
        return _WORD, character  # decomposing Korean would only make it longer
    parts = unicodedata.normalize("NFD", character.lower())
    letters = ""
    for part in parts:
        category = unicodedata.category(part)
        if category in ("Mn", "Me", "Cf"):
            continue  # accents, and marks without width such as a soft hyphen
        if category[0] not in "LNM":
            return _SEPARATOR, ""
        letters += "0" if category == "Nd" else part
    if not letters:
        return _NOTHING, ""
    spaceless = any(low <= ord(character) <= high for low, high in _SPACELESS)
    return (_ALONE if spaceless else _WORD), letters


def _letter(code: int) -> int:
    character = chr(code)
    if code >= 128 or character.isalpha():
        return ord(character.lower()) if code < 128 else code
    return ord("0") if character.isdigit() else 0


LETTERS = bytes(map(_letter, range(256)))  # of folded bytes: 0 between words, else what it counts as


@cache
def _kind(code: int) -> int:
    if code < 128:
        return _WORD if LETTERS[code] else _SEPARATOR
    return _fold(chr(code))[0]


def word_spans(text: str) -> tuple[Ints, Ints]:
    """Where each word of the folded text begins and ends in the text itself, in characters."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    different, which = np.unique(codes, return_inverse=True)
    kinds = np.array([_kind(code) for code in different.tolist()], np.uint8)[which]
    seen = np.flatnonzero(kinds != _NOTHING)  # what folds to nothing does not end a word
    kinds = kinds[seen]
    before = np.concatenate([[_SEPARATOR], kinds[:-1]])
    after = np.concatenate([kinds[1:], [_SEPARATOR]])
    starts = seen[(kinds == _ALONE) | ((kinds == _WORD) & (before != _WORD))]
    ends = seen[(kinds == _ALONE) | ((kinds == _WORD) & (after != _WORD))] + 1
    return starts.astype(np.int64), ends.astype(np.int64)
