"""When two texts count as the same: what exact and paragraph deduplication hash."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash


def simplify(text: str, case: bool, whitespace: bool, punctuation: bool) -> str:
    """The text without the differences that are to be ignored."""
    if case:
        text = text.casefold()
    if punctuation:
        text = text.translate(_PUNCTUATION)
    return " ".join(text.split()) if whitespace else text


class _Punctuation(dict[int, str]):
    """Punctuation and symbols become nothing; found out when a character is first met."""

    def __missing__(self, code: int) -> str:
        made = "" if unicodedata.category(chr(code))[0] in "PS" else chr(code)
        self[code] = made
        return made


_PUNCTUATION = _Punctuation()


def hash_128(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Two 64-bit halves for each text. With 10^12 texts, 128 bits collide with probability 10^-15; 64 bits would
    thousands of times, and a length beside them would not help much, as lengths repeat so often."""
    raw = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    halves = np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()
