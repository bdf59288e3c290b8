"""Many strings in one file, read by number without loading the others: paths and document ids of a token store.

The strings in UTF-8 one after another, zero bytes up to a multiple of 8, then an int64 offset for every string and
the end. What it costs in memory is the offsets, while writing; while reading nothing, as the file is mapped.
"""

from __future__ import annotations

from array import array
from typing import IO

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8
_COPY_BYTES = 1 << 22


class StringsWriter:
    """Writes a table; `close` appends the offsets."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, text: str) -> None:
        data = text.encode()
        self.file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def append_empty(self, strings: int) -> None:
        self._ends.extend([self._ends[-1]] * strings)

    def append_table(self, table: Strings) -> None:
        """All strings of another table, copied in blocks."""
        for first in range(0, table.text.size, _COPY_BYTES):
            self.file.write(table.text[first : first + _COPY_BYTES].data)
        self._ends.frombytes((table.offsets[1:] + self._ends[-1]).astype(np.int64).tobytes())

    def close(self) -> None:
        self.file.write(bytes(-self._ends[-1] % _ALIGNMENT))
        self.file.write(np.frombuffer(self._ends, np.int64).astype("<i8", copy=False).data)


class Strings:
    """A table of so many strings, over the bytes of its file."""

    def __init__(self, data: npt.NDArray[np.uint8], count: int) -> None:
        cut = data.size - 8 * (count + 1)
        if cut < 0 or cut % _ALIGNMENT:
            raise ValueError(f"{data.size} bytes cannot hold {count} strings")
        self.offsets = data[cut:].view("<i8")
        self.text = data[: int(self.offsets[-1])]
        if cut != self.text.size + -self.text.size % _ALIGNMENT:
            raise ValueError(f"its text ends at byte {self.text.size} instead of {cut}")

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __getitem__(self, number: int) -> str:
        start, stop = self.offsets[number : number + 2].tolist()
        return self.text[start:stop].tobytes().decode()
