"""WebDataset archives: tar files in which `key.txt` and `key.json` are members of one sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Self

from bessemer.data.document import Document
from bessemer.data.read import rows
from bessemer.data.read.rows import Reading, Row, Rows, parse_json
from bessemer.data.read.unpack import Damaged


def read_webdataset(reading: Reading) -> Rows:
    """One document for each sample, with the key as its id unless the source names a field. The text field is a
    member's extension (`txt`) or a field of the `json` member; `text` stands for `txt`, too. Members that are not
    wanted, such as images, are passed over without being held."""
    wanted = {*reading.fields, "json"} | ({"txt"} if "text" in reading.fields else set())
    with reading.open_unpacked() as file:
        for row, sample in enumerate(_samples(file, wanted), start=1):
            yield _document(reading, row, sample)


@dataclass
class _Sample:
    key: str
    members: dict[str, bytes | None] = field(default_factory=dict)  # by extension; None: not wanted
    problem: str = ""


def _samples(file: IO[bytes], wanted: set[str]) -> Iterator[_Sample]:
    """Members that follow each other with one key are a sample."""
    sample: _Sample | None = None
    for member, content in _members(file, wanted):
        key, extension = _split(member.name)
        if not extension:
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if extension in sample.members:
            sample.problem = f"two members {member.name}; give every sample a key of its own"
        if extension in wanted and content is None:
            sample.problem = f"{member.name} has {member.size:,} bytes; split it or delete it"
        sample.members[extension] = content
    if sample is not None:
        yield sample


def _document(reading: Reading, row: int, sample: _Sample) -> Row | None:
    if sample.problem:
        return reading.bad(row, sample.problem, sample.key)
    record: dict[str, Any] = {}
    described = sample.members.get("json")
    if described is not None:
        try:
            record = parse_json(described, "utf-8-sig")
        except (ValueError, RecursionError) as error:
            reason = f"{sample.key}.json is not valid JSON in UTF-8 ({error}); correct or delete it"
            return reading.bad(row, reason, described)
        if not isinstance(record, dict):
            reason = f"{sample.key}.json holds a {type(record).__name__}, not an object"
            return reading.bad(row, reason, described)
    if sample.members.get("txt") is not None:
        record.setdefault("text", sample.members["txt"])
    document = reading.document(row, {**record, **sample.members})
    if isinstance(document, Document) and not reading.source.id_field:
        document.id = sample.key
    return document


def _members(file: IO[bytes], wanted: set[str]) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The files in order, with the content of those that are wanted and not too long."""
    try:
        # Archives that were put one behind the other are read to the end.
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member, ignore_zeros=True) as archive:
            while (member := archive.next()) is not None:
                if member.isfile():
                    content = None
                    if _split(member.name)[1] in wanted and member.size <= rows.LONGEST_ROW_BYTES:
                        taken = archive.extractfile(member)
                        content = taken.read() if taken is not None else b""
                    yield member, content
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile remembers every member, about 1 KB each
    except tarfile.TarError as error:
        raise Damaged(f"not readable as a tar archive ({error})") from error


class _Member(tarfile.TarInfo):
    """tarfile ends in silence where a header is damaged or the file is cut off; this does not."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> Self:
        zeros = getattr(tarfile_, "at_zeros", False)
        tarfile_.at_zeros = False
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tarfile_.at_zeros = True
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            if not zeros:
                raise EOFError("the archive ends without its end marker") from None
            tarfile_.at_zeros = True
            raise
        except tarfile.HeaderError as error:
            raise Damaged(f"not readable as a tar archive ({error})") from error


def _split(name: str) -> tuple[str, str]:
    """The sample's key and the extension: what follows the first dot of the file's own name."""
    folder, slash, own = name.rpartition("/")
    stem, _, extension = own.partition(".")
    return folder + slash + stem, extension.lower() if stem else ""
