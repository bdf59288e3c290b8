"""Where the cache of curation keeps things, how they are written, and the few measures of a text that everything
uses."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from bessemer.errors import UserError

_HASH_PIECE_CHARS = 1 << 20


def ledger_path(cache: Path, key: str) -> Path:
    return cache / "steps" / key[:2] / key


def counts_path(cache: Path, key: str) -> Path:
    """What was counted: of a ledger, a reading or a census."""
    return ledger_path(cache, key).with_suffix(".json")


def quarantine_path(cache: Path, key: str) -> Path:
    return ledger_path(cache, key).with_suffix(".quarantine.jsonl")


def collected_path(cache: Path, key: str) -> Path:
    return cache / "collected" / key[:2] / f"{key}.npz"


def ruling_path(cache: Path, key: str, part: int) -> Path:
    return cache / "rulings" / key / f"{part:06d}.npz"


def text_hash(text: str, seed: int) -> int:
    """Of the text in UTF-8; by pieces, so that a long document is not copied whole."""
    if len(text) <= _HASH_PIECE_CHARS:
        return int(xxhash.xxh3_64_intdigest(text.encode(), seed=seed))
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(text), _HASH_PIECE_CHARS):
        state.update(text[start : start + _HASH_PIECE_CHARS].encode())
    return int(state.intdigest())


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@contextlib.contextmanager
def space_for(folder: Path) -> Iterator[None]:
    """A full disk is told in one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = "free some and run again: what was finished is kept"
        raise UserError(f"no space left for {folder}; {fix}") from error


@contextlib.contextmanager
def naming(name: str, folder: Path) -> Iterator[None]:
    """Every error says which part it struck."""
    try:
        with space_for(folder):
            yield
    except UserError as error:
        raise UserError(f"{name}: {error}" if name not in str(error) else str(error)) from error
    except OSError as error:
        raise UserError(f"{name}: {error}") from error
    except MemoryError as error:
        raise UserError(f"{name}: out of memory; use fewer workers") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what is to be at `path`: it gets there at the end, whole, and a failure leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears at `path`, whole and on the disk, at the end."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def load_arrays(path: Path) -> dict[str, Any]:
    try:
        with open_arrays(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fix = f"delete the folder {path.parent} and run again"
        raise UserError(f"{path}: damaged ({error}); {fix}") from error


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[Any]:
    """What `save_arrays` wrote, for reading some of it. An archive has a checksum of every array in it; its comment is
    the name that it was written under, so one that was put in another's place is noticed (older ones have none)."""
    with np.load(path, allow_pickle=False) as arrays:
        if arrays.zip.comment not in (b"", _identity(path)):
            raise ValueError(f"it was written as {arrays.zip.comment.decode(errors='replace')}")
        yield arrays


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    assert not {"file", "allow_pickle"} & set(arrays), "numpy takes these names for its own arguments"
    with replacing(path) as temporary, open(temporary, "w+b") as file:
        np.savez(file, **arrays)
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = _identity(path)
        file.flush()
        os.fsync(file.fileno())


def _identity(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()
