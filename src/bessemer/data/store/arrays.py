"""Memory for batches that is used again.

Every batch is some megabytes of new arrays. Taken from the system each time, the first touch of their pages costs 5 to
8 ns a token, more than all the rest of making a batch; how often that happens depends on what else the process has
allocated. So their memory comes from slabs, which return to their pool when the last array in them is dropped.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALL_BYTES = 1 << 17  # below this, memory is taken as always
_SPARE_SLABS = 4
_SPREAD_CELLS = 1 << 14


class Arrays:
    """A pool of slabs; safe for many threads. A pickled copy starts empty."""

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque(maxlen=_SPARE_SLABS)  # single operations on it need no lock

    def __reduce__(self) -> tuple[type[Arrays], tuple[()]]:
        return Arrays, ()

    def take(self, shape: tuple[int, ...], *dtypes: Any) -> list[npt.NDArray[Any]]:
        """An uninitialised array of this shape for each type, all in one slab."""
        cells = int(np.prod(shape))
        types = [np.dtype(dtype) for dtype in dtypes]
        sizes = [-(-cells * dtype.itemsize // 64) * 64 for dtype in types]
        if sum(sizes) < _SMALL_BYTES:
            return [np.empty(shape, dtype) for dtype in types]
        slab = self._slab(sum(sizes))
        # Arrays made from it keep this one alive, and with it the slab: when it goes, they are all gone.
        owner = np.frombuffer(slab, np.uint8)
        weakref.finalize(owner, self._spare.append, slab).atexit = False
        arrays, begin = [], 0
        for dtype, size in zip(types, sizes, strict=True):
            arrays.append(owner[begin : begin + cells * dtype.itemsize].view(dtype).reshape(shape))
            begin += size
        return arrays

    def _slab(self, size_bytes: int) -> mmap.mmap:
        for _ in range(len(self._spare)):
            try:
                slab = self._spare.popleft()
            except IndexError:  # another thread took the last
                break
            if size_bytes <= len(slab) <= 2 * size_bytes:
                return slab
            self._spare.append(slab)
        slab = mmap.mmap(-1, size_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        return slab


def spread(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    """Fills a flat array with each value as many times as its length says: np.repeat without a large intermediate."""
    for first, stop, begin, end in chunks(lengths, _SPREAD_CELLS):
        out[begin:end] = np.repeat(values[first:stop], lengths[first:stop])


def chunks(lengths: npt.NDArray[np.int64], cells: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of neighbours that have about so many cells together, or one that has more: (first, stop, and the cells
    before each of these two)."""
    if not lengths.size:
        return
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    if total <= cells:
        yield 0, lengths.size, 0, total
        return
    cuts = np.searchsorted(ends, np.arange(cells, total, cells), side="right").tolist()
    begin = 0
    for first, stop in pairwise([0, *cuts, lengths.size]):
        if first < stop:
            end = int(ends[stop - 1])
            yield first, stop, begin, end
            begin = end
