"""Which tokens of a store count as targets: one bit each, with counts that make any span's sum a lookup.

The `.mask` file is a record for every 64 tokens (how many count before it, and its 64 bits) and one more at the end:
a quarter of a byte per token, and the number of targets in a span costs two records instead of a scan.
"""

from __future__ import annotations

from typing import IO, Any

import numpy as np
import numpy.typing as npt

RECORD = np.dtype([("before", "<u8"), ("bits", "<u8")])
_BITS = 64
_FLUSH_TOKENS = 1 << 16

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def mask_bytes(tokens: int) -> int:
    """The size of the file."""
    return (tokens // _BITS + 1) * RECORD.itemsize


class MaskWriter:
    """Appends to a `.mask`, in memory that does not grow; `close` writes what is left."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.tokens, self.kept = file, 0, 0
        self._waiting: list[Bytes] = []
        self._waiting_tokens = self._before = 0

    def append(self, mask: Bytes) -> None:
        """1 for a token that counts, 0 for one that does not; nothing else."""
        self._waiting.append(mask)
        self._waiting_tokens += mask.size
        self.tokens += mask.size
        self.kept += int(np.count_nonzero(mask))
        if self._waiting_tokens >= _FLUSH_TOKENS:
            self._flush(self._waiting_tokens // _BITS * _BITS)

    def append_ones(self, tokens: int) -> None:
        for first in range(0, tokens, _FLUSH_TOKENS):
            self.append(np.ones(min(_FLUSH_TOKENS, tokens - first), np.uint8))

    def close(self) -> None:
        self._flush(self._waiting_tokens // _BITS * _BITS)
        self._waiting.append(np.zeros(_BITS - self._waiting_tokens, np.uint8))
        self._flush(_BITS)

    def _flush(self, tokens: int) -> None:
        flat = np.concatenate([*self._waiting, np.empty(0, np.uint8)])
        records = np.empty(tokens // _BITS, RECORD)
        records["bits"] = np.packbits(flat[:tokens], bitorder="little").view("<u8")
        counts = np.bitwise_count(records["bits"]).astype(np.int64)
        records["before"] = self._before + np.cumsum(counts) - counts
        self._before += int(counts.sum())
        self.file.write(records.tobytes())
        self._waiting, self._waiting_tokens = [flat[tokens:]], flat.size - tokens


def kept_before(records: npt.NDArray[Any], positions: Ints) -> Ints:
    """How many tokens before each position count; a position may be the end."""
    word, bit = positions >> 6, (positions & 63).astype(np.uint64)
    found = records[word]
    below = found["bits"] & ((np.uint64(1) << bit) - np.uint64(1))
    return found["before"].astype(np.int64) + np.bitwise_count(below)


def mask_bits(records: npt.NDArray[Any], positions: Ints) -> Bytes:
    """1 for each position whose token counts, else 0. By bytes: words of 64 bits take a third longer."""
    byte = positions >> 3
    byte += (byte & ~7) + 8  # every eight bytes of bits follow eight bytes of a count
    bits: Bytes = records.view(np.uint8).take(byte, mode="clip")
    bits >>= positions.astype(np.uint8) & np.uint8(7)
    bits &= np.uint8(1)
    return bits


def mask_run(records: npt.NDArray[Any], start: int, length: int) -> Bytes:
    """The mask of one run of tokens."""
    words = np.ascontiguousarray(records["bits"][start >> 6 : (start + length + _BITS - 1) >> 6])
    begin = start & 63
    return np.unpackbits(words.view(np.uint8), bitorder="little")[begin : begin + length]


def mask_windows(records: npt.NDArray[Any], starts: Ints, length: int) -> Bytes:
    """Row i is the mask of the `length` tokens from `starts[i]` on."""
    words = (length + 2 * _BITS - 2) // _BITS  # as many as the worst alignment touches
    columns = (starts >> 6)[:, None] + np.arange(words)
    bits = records["bits"][np.minimum(columns, records.size - 1)]
    flat = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little").ravel()
    # Each row begins inside its first word: overlapping windows over the flat bits move it to its place.
    windows = np.lib.stride_tricks.as_strided(flat, (max(0, flat.size - length + 1), length), (1, 1), writeable=False)
    return windows[np.arange(starts.size) * words * _BITS + (starts & 63)]
