"""A teacher's most likely next tokens for the rows of a run, on disk: distillation without the teacher in memory.

A folder holds `teacher.json` (which teacher, settings and rows) and three arrays with an entry for each row: `ids.npy`
(the K most likely tokens of each column), `log_p.npy` (their log-probabilities, then that of all other tokens together;
NaN where the teacher has no prediction that compares), and `digests.npy` (of a row's entries; 0: not stored). The
arrays are sparse files: a row takes disk space once it is written. Legend: R rows, T columns, K tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.stream.rows import Rows
from bessemer.errors import UserError
from bessemer.storage import write_atomic

if TYPE_CHECKING:
    from bessemer.data.stream.batches import Batch

HEADER = "teacher.json"
PLACES = "teacher_places"  # field of a batch: the row of the store times T plus the column, -1 for padding
TRAIN, VALIDATION = "train", "validation"
_FORMAT = 1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Section:
    """The rows of one source; `first` is the number of its first row in the store."""

    split: str
    source: str
    first: int
    rows: int
    fingerprint: str
    packing: str

    @property
    def name(self) -> str:
        return f"{self.source} ({self.split})"


def sections_of(splits: Mapping[str, Mapping[str, Rows]]) -> list[Section]:
    """The sections of a run's rows, by split and source."""
    sections: list[Section] = []
    for split, sources in splits.items():
        for source, rows in sorted(sources.items()):
            first = sections[-1].first + sections[-1].rows if sections else 0
            sections.append(Section(split, source, first, rows.count, rows.fingerprint, rows.packing))
    return sections


@dataclass(frozen=True)
class TeacherHeader:
    """What a store holds. `path` and `weights` name the teacher. `vocab` is the number of the student's tokens over
    which distributions are compared. `covered` is the share of the trained tokens that a mapped teacher predicts, times
    its probability of tokens that the student has too."""

    path: str
    weights: str
    parameters: int
    top_k: int
    temperature: float
    context: int
    vocab: int
    sections: list[Section]
    covered: float = 1.0
    format: int = _FORMAT

    @property
    def fingerprint(self) -> str:
        """Of what decides the numbers."""
        values = {key: value for key, value in asdict(self).items() if key not in ("path", "covered")}
        return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())

    @property
    def summary(self) -> dict[str, Any]:
        """For scripts."""
        return {key: value for key, value in asdict(self).items() if key not in ("sections", "format")}

    def difference(self, wanted: Mapping[str, Any]) -> str:
        """The first of the wanted settings that the store does not have; empty if it has them all."""
        names = {"path": "models.teacher", "context": "data.context", "sections": "the rows of data"}
        for key, value in wanted.items():
            if (held := getattr(self, key)) != value:
                values = "differ" if key == "sections" else f"{held}, not {value}"
                return f"{names.get(key, f'distill.{key}')} {values}"
        return ""


class TeacherStore:
    """Open with `writable` to add rows. Several processes may add different rows."""

    def __init__(self, folder: str | Path, writable: bool = False) -> None:
        self.folder = Path(folder).expanduser()
        try:
            content = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
            sections = [Section(**section) for section in content.pop("sections")]
            self.header = TeacherHeader(sections=sections, **content)
            self._ids, self._log_p, self._digests = (
                np.load(self.folder / f"{name}.npy", mmap_mode="r+" if writable else "r")
                for name in ("ids", "log_p", "digests")
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"distill.stored: {self.folder} cannot be read ({error}): delete the folder") from None
        self._verified = np.zeros(len(self._digests), np.bool_)

    @classmethod
    def create(cls, folder: str | Path, header: TeacherHeader, top_k: int) -> TeacherStore:
        """An empty store for `top_k` tokens of each column. The header is written last."""
        place = Path(folder).expanduser()
        place.mkdir(parents=True, exist_ok=True)
        rows, columns = sum(section.rows for section in header.sections), header.context
        kinds = {
            "ids": ("u4", (rows, columns, top_k)),
            "log_p": ("f4", (rows, columns, top_k + 1)),
            "digests": ("u8", (rows,)),
        }
        for name, (kind, shape) in kinds.items():
            np.lib.format.open_memmap(place / f"{name}.npy", "w+", np.dtype(kind), shape)  # type: ignore[no-untyped-call]
        write_atomic(place / HEADER, json.dumps(asdict(header), indent=1))
        return cls(place, writable=True)

    @property
    def stored(self) -> npt.NDArray[np.bool_]:
        """(R,): the rows that are there."""
        return np.asarray(self._digests) != 0

    @property
    def row_bytes(self) -> int:
        """Disk space of a row."""
        return int(self._ids[:1].nbytes + self._log_p[:1].nbytes)

    def section(self, split: str, source: str) -> Section:
        return next(each for each in self.header.sections if (each.split, each.source) == (split, source))

    def write(self, rows: Ints, ids: Ints, log_p: Floats) -> None:
        """Digests are written after the data is on disk: a killed process leaves its rows as not stored."""
        self._ids[rows], self._log_p[rows] = ids, log_p
        self._ids.flush(), self._log_p.flush()
        self._digests[rows] = [self._digest(row) for row in rows.tolist()]
        self._digests.flush()

    def read(self, places: Ints) -> tuple[Ints, Floats]:
        """(..., K) ids and (..., K + 1) log-probabilities at the places of `PLACES`. UserError for rows that are not
        stored or have changed."""
        row, column = np.divmod(np.maximum(places, 0), self.header.context)
        for number in np.unique(row[places >= 0]).tolist():
            self._verify(number)
        ids, log_p = self._ids[row, column].astype(np.int64), np.array(self._log_p[row, column])
        ids[places < 0], log_p[places < 0] = 0, np.nan
        return ids, log_p

    def _verify(self, row: int) -> None:
        if self._verified[row]:
            return
        digest = int(self._digests[row])
        if digest != self._digest(row):
            section = next(s for s in reversed(self.header.sections) if s.first <= row)
            what = "is not stored" if digest == 0 else "has changed on disk"
            fix = "run `bessemer data teacher` with this spec" if digest == 0 else "delete the folder and store it anew"
            place = f"row {row - section.first:,} of {section.name}"
            raise UserError(f"distill.stored: {self.folder}: {place} {what}: {fix}")
        self._verified[row] = True

    def _digest(self, row: int) -> int:
        content = xxhash.xxh3_64(np.ascontiguousarray(self._ids[row]).data)
        content.update(np.ascontiguousarray(self._log_p[row]).data)
        return content.intdigest() | 1


class TeacherPlaces:
    """A `Transform` that tells where the teacher's predictions of each column are stored. `names` are the stream's
    sources. A change of the store is a change of the stream."""

    def __init__(self, folder: str, split: str, names: Sequence[str]) -> None:
        self.folder, self.split, self.names = folder, split, tuple(names)

    @cached_property
    def _store(self) -> TeacherStore:
        return TeacherStore(self.folder)

    @cached_property
    def _first(self) -> Ints:
        return np.array([self._store.section(self.split, name).first for name in self.names], np.int64)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"teacher": self._store.header.fingerprint}

    def __call__(self, batch: Batch) -> Batch:
        rows = self._first[np.maximum(batch.sources, 0)] + batch.sequences
        columns = np.arange(batch.tokens.shape[1])
        places = rows[:, None] * self._store.header.context + columns
        places[batch.sources < 0] = -1
        batch.fields = {**batch.fields, PLACES: places}
        return batch
