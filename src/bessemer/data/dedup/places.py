"""From a document's number in the corpus back to FILE:ROW, for the messages and reports of steps that compare. Rows
mostly run on from one document to the next, so what is noted is where they do not: one record for a batch of a JSONL
file, one for each file of a source tree. The table lies on disk; looking up costs no memory of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.shuffle import load, numbering
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Ints

_COLUMNS = ("number", "row", "end", "name")
PLACE_ARRAYS = ("place_ordinal", "place_row", "place_length", "place_name")


def note_places(documents: Sequence[Document], ordinals: Ints) -> dict[str, npt.NDArray[Any]]:
    """What `collect` has to keep so that the places of these documents can be found."""
    found: list[tuple[int, int, bytes]] = []
    file, shift = None, 0
    for document, ordinal in zip(documents, ordinals.tolist(), strict=True):
        if document.file != file or document.row - ordinal != shift:
            file, shift = document.file, document.row - ordinal
            found.append((ordinal, document.row, file.encode()))
    return {
        "place_ordinal": np.array([one[0] for one in found], np.int64),
        "place_row": np.array([one[1] for one in found], np.int64),
        "place_length": np.array([len(one[2]) for one in found], np.int64),
        "place_name": np.frombuffer(b"".join(one[2] for one in found), np.uint8),
    }


class Places:
    """The table of a whole corpus, made from what was noted of each part and that part's first document number."""

    @classmethod
    def of(cls, collected: Sequence[Collected], scratch: Path) -> Self:
        numbers = numbering(collected).tolist()
        return cls(scratch / "places", ((numbers[part.part], load(part, PLACE_ARRAYS)) for part in collected))

    def __init__(self, folder: Path, parts: Iterable[tuple[int, Arrays]]) -> None:
        folder.mkdir()
        end = 0
        with contextlib.ExitStack() as stack:
            columns = {name: stack.enter_context(open(folder / name, "wb")) for name in _COLUMNS}
            for first, arrays in parts:
                if arrays:
                    ends = np.cumsum(arrays["place_length"]) + end
                    end = int(ends[-1]) if ends.size else end
                    written = arrays["place_ordinal"] + first, arrays["place_row"], ends, arrays["place_name"]
                    for name, values in zip(_COLUMNS, written, strict=True):
                        columns[name].write(values.tobytes())
        self._number, self._row, self._end = (_mapped(folder / name, np.int64) for name in _COLUMNS[:3])
        self._name = _mapped(folder / "name", np.uint8)

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The record (of those noted) and row of each document."""
        run = np.searchsorted(self._number, numbers, side="right") - 1
        return run, self._row[run] + (numbers - self._number[run])

    def file_name(self, record: int) -> bytes:
        start = int(self._end[record - 1]) if record else 0
        return self._name[start : int(self._end[record])].tobytes()

    def place(self, number: int) -> str:
        record, row = self.find(np.array([number], np.int64))
        return f"{self.file_name(int(record[0])).decode()}:{row[0]}"

    def pack(self, numbers: Ints) -> dict[str, npt.NDArray[Any]]:
        """The places of some documents as arrays for a ruling; `unpack` reads them."""
        record, row = self.find(numbers)
        different, which = np.unique(record, return_inverse=True)
        own = [self.file_name(one) for one in different.tolist()]
        names = {name: file for file, name in enumerate(dict.fromkeys(own))}
        return {
            "of_file": np.array([names[name] for name in own], np.int32)[which],
            "of_row": row,
            "file_end": np.cumsum([len(name) for name in names], dtype=np.int64),
            "file_name": np.frombuffer(b"".join(names), np.uint8),
        }


def unpack(ruling: Arrays, record: int) -> str:
    """The place of one record of a ruling."""
    file = int(ruling["of_file"][record])
    start = int(ruling["file_end"][file - 1]) if file else 0
    name = ruling["file_name"][start : int(ruling["file_end"][file])].tobytes().decode()
    return f"{name}:{ruling['of_row'][record]}"


def _mapped(path: Path, dtype: type[Any]) -> npt.NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
