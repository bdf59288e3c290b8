"""From a document's number in the corpus back to FILE:ROW, for the messages and reports of steps that compare.

Rows mostly run on from one document to the next, so what is noted is where they do not: one record for a JSONL file,
one for each file of a source tree. The table lies on disk; looking up costs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.document import Document
from bessemer.data.step import Arrays

Ints = npt.NDArray[np.int64]
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

    def __init__(self, folder: Path, parts: Iterable[tuple[int, Arrays]]) -> None:
        folder.mkdir()
        last: tuple[bytes, int] | None = None  # the file and row - number of the run before
        files = -1
        columns = {name: open(folder / name, "wb") for name in ("number", "row", "file", "end", "name")}  # noqa: SIM115
        end = 0
        for first, arrays in parts:
            if not arrays:
                continue
            names, at = arrays["place_name"].tobytes(), 0
            lengths = arrays["place_length"].tolist()
            numbers = arrays["place_ordinal"] + first
            kept, of_file = np.zeros(numbers.size, bool), np.zeros(numbers.size, np.int64)
            ends: list[int] = []
            for i, shift in enumerate((arrays["place_row"] - numbers).tolist()):
                name = names[at : at + lengths[i]]
                at += lengths[i]
                if (name, shift) == last:
                    continue
                if last is None or name != last[0]:
                    files += 1
                    end += len(name)
                    ends.append(end)
                    columns["name"].write(name)
                last = name, shift
                kept[i], of_file[i] = True, files
            columns["number"].write(numbers[kept].tobytes())
            columns["row"].write(arrays["place_row"][kept].tobytes())
            columns["file"].write(of_file[kept].tobytes())
            columns["end"].write(np.array(ends, np.int64).tobytes())
        for column in columns.values():
            column.close()
        self._number, self._row, self._file, self._end = (
            _mapped(folder / name, np.int64) for name in ("number", "row", "file", "end")
        )
        self._name = _mapped(folder / "name", np.uint8)

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The file (a number of this table) and row of each document."""
        run = np.searchsorted(self._number, numbers, side="right") - 1
        return self._file[run], self._row[run] + (numbers - self._number[run])

    def file_name(self, file: int) -> bytes:
        start = int(self._end[file - 1]) if file else 0
        return self._name[start : int(self._end[file])].tobytes()

    def place(self, number: int) -> str:
        file, row = self.find(np.array([number], np.int64))
        return f"{self.file_name(int(file[0])).decode()}:{row[0]}"

    def pack(self, numbers: Ints) -> dict[str, npt.NDArray[Any]]:
        """The places of some documents as arrays for a ruling; `unpack` reads them."""
        file, row = self.find(numbers)
        different, which = np.unique(file, return_inverse=True)
        names = [self.file_name(one) for one in different.tolist()]
        return {
            "of_file": which.astype(np.int32),
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
