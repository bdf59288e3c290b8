"""Places chosen by the bytes around them, so that equal passages have them at equal places: the index of substrings.
Every window of `length` bytes has one anchor, the smallest hash among its k-byte windows (winnowing). Equal windows
have equal anchors at the same distance from their beginning, wherever they stand; so windows need only be compared
where anchors agree. An anchor serves all windows in a row that have it: about one anchor for every length / 4
bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.shingles import powers
from bessemer.data.dedup.shuffle import begins
from bessemer.data.order import mix
from bessemer.data.step import Ints

Words = npt.NDArray[np.uint64]

BYTE_VALUES = mix(np.arange(256) + (2 << 32))
BASE = 0xC2B2AE3D27D4EB4F  # odd, so that it has an inverse modulo 2^64
_FINISH = np.uint64(0x9E6C63D0876A9A47)
_BLOCK_BYTES = 1 << 17  # hashed at once: 1 MB for each array of words
_PLACE_BITS = 21
_PLACE = np.uint64((1 << _PLACE_BITS) - 1)


@dataclass(frozen=True)
class Anchors:
    """Anchor i stands at byte `offset[i]` of document `document[i]`. It serves the `span[i]` windows that begin from
    `lead[i]` bytes before it on. Windows in `local` (document, start, end: rows) repeat an earlier one of the same
    document for certain, and have no anchor here."""

    key: Words
    document: Ints
    offset: Ints
    lead: Ints
    span: Ints
    local: Ints


def gram_length(length: int) -> int:
    """k: half the window. Shorter, more passages would agree by chance; longer, there would be more anchors."""
    return max(1, length // 2)


def find_anchors(texts: Sequence[bytes], length: int) -> Anchors:
    """The anchors of all windows of `length` bytes inside each text. Some 30 MB/s on one core."""
    found = [_block_anchors(block, length) for block in _blocks(texts, length)]
    if not found:
        none = np.empty(0, np.int64)
        return Anchors(np.empty(0, np.uint64), none, none, none, none, np.empty((0, 3), np.int64))
    names = ("key", "document", "offset", "lead", "span", "local")
    return Anchors(*(np.concatenate([getattr(one, name) for one in found]) for name in names))


@dataclass(frozen=True)
class _Block:
    """Some texts, or a piece of a long one: text `first + i` takes the bytes up to `ends[i]`."""

    data: npt.NDArray[np.uint8]
    first: int
    ends: Ints
    offset: int  # of the data's first byte in its text


def _blocks(texts: Sequence[bytes], length: int) -> Iterator[_Block]:
    """Cut by the texts alone, so that a text has the same anchors in any batch."""
    limit = max(_BLOCK_BYTES, 8 * length)
    held: list[bytes] = []
    size = 0
    for i, text in enumerate(texts):
        if held and size + len(text) > limit:
            yield _whole(held, i - len(held))
            held, size = [], 0
        if len(text) <= limit:
            held.append(text)
            size += len(text)
            continue
        for start in range(0, len(text) - length + 1, limit - length + 1):  # each window in one piece
            piece = np.frombuffer(text, np.uint8, min(limit, len(text) - start), start)
            yield _Block(piece, i, np.array([piece.size]), start)
    if held:
        yield _whole(held, len(texts) - len(held))


def _whole(texts: Sequence[bytes], first: int) -> _Block:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return _Block(np.frombuffer(b"".join(texts), np.uint8), first, ends, 0)


def _block_anchors(block: _Block, length: int) -> Anchors:
    k = gram_length(length)
    count = max(block.data.size - length + 1, 0)  # windows, those across two texts among them
    hashes = _gram_hashes(block.data, k)
    later_first = _PLACE - np.arange(hashes.size, dtype=np.uint64)  # of equal hashes, the last is the anchor
    ordered = (hashes & ~_PLACE) | later_first
    smallest = _sliding_minimum(ordered, length - k + 1)[:count]
    origins = np.concatenate([[0], block.ends[:-1]])
    text = np.repeat(np.arange(block.ends.size), block.ends - origins)[:count]
    inside = np.flatnonzero(np.arange(count) + length <= block.ends[text])
    place = (_PLACE - (smallest[inside] & _PLACE)).astype(np.int64)
    starts = np.flatnonzero(begins(place))
    place, low, text = place[starts], inside[starts], text[inside[starts]]
    span = np.diff(starts, append=inside.size)
    kept, local = _without_periods(hashes[place], text, place, low, span, length)
    shift = block.offset - origins
    local[:, 1:] += shift[local[:, :1]]
    local[:, 0] += block.first
    place, low, text, span = place[kept], low[kept], text[kept], span[kept]
    return Anchors(hashes[place], text + block.first, place + shift[text], place - low, span, local)


def _gram_hashes(data: npt.NDArray[np.uint8], k: int) -> Words:
    """Of every k bytes in a row: a polynomial, by differences of its running sum."""
    if data.size < k:
        return np.empty(0, np.uint64)
    rising, inverses = powers(BASE, max(_BLOCK_BYTES, 1 << data.size.bit_length()))
    values = BYTE_VALUES[data]
    values *= rising[: data.size]
    sums = np.concatenate([np.zeros(1, np.uint64), np.add.accumulate(values)])
    hashes = sums[k:] - sums[:-k]
    hashes *= inverses[: hashes.size]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _FINISH
    hashes ^= hashes >> np.uint64(29)
    return hashes


def _sliding_minimum(values: Words, width: int) -> Words:
    """Of every `width` values in a row, in log2(width) rounds of doubling."""
    if values.size < width:
        return values[:0]
    reach = 1
    while 2 * reach <= width:
        values = np.minimum(values[:-reach], values[reach:])
        reach *= 2
    return np.minimum(values[: values.size - (width - reach)], values[width - reach :])


def _without_periods(
    keys: Words, text: Ints, place: Ints, low: Ints, span: Ints, length: int
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Which anchors are needed, and rows (text, start, end) of the block that repeat for certain. Where a few bytes
    repeat over and over (a megabyte of spaces), every byte or two would be an anchor. Equal anchors p apart, p at
    most k, prove that the bytes between have period p; in such a zone a window repeats the one before it by the first
    multiple of p that clears `length`, which begins no earlier than the zone."""
    kept = np.ones(keys.size, bool)
    rows: list[tuple[int, int, int]] = []
    k = gram_length(length)
    apart = np.diff(place)
    linked = (keys[1:] == keys[:-1]) & (text[1:] == text[:-1]) & (apart <= k)
    if linked.any():
        edges = np.append(np.flatnonzero(begins(linked, apart)), linked.size)
        first, last = edges[:-1], edges[1:]  # a chain's links are [first, last), its anchors [first, last]
        long = linked[first] & (place[last] - place[first] >= 2 * length - k)
        for start, stop in zip(first[long].tolist(), last[long].tolist(), strict=True):
            period = int(apart[start])
            begin = int(place[start]) + -(-length // period) * period
            end = int(place[stop]) + k
            if end - begin < length:
                continue
            rows.append((int(text[start]), begin, end))
            some = slice(start, stop + 1)
            kept[some] = (low[some] < begin) | (low[some] + span[some] - 1 + length > end)
    return kept, np.array(rows, np.int64).reshape(-1, 3)
