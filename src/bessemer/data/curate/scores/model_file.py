"""How a trained scorer is kept: one safetensors file, its arrays mapped into memory and shared by all workers. No
pickle is read or written. `kind` and `version` say which code may read the file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.errors import UserError
from bessemer.storage import atomic_path

_DTYPES = {"U64": "<u8", "I64": "<i8", "I32": "<i4", "U8": "u1"}
_LONGEST_HEADER = 100_000_000  # as in safetensors itself


def save_model(path: Path, kind: str, version: int, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Writes the file under another name and renames it when it is complete."""
    from safetensors.numpy import save_file

    metadata = {"bessemer": json.dumps({"kind": kind, "version": version, **about}, sort_keys=True)}
    with atomic_path(path, parents=True) as partial:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial, metadata)


def load_model(
    path: str | Path, kind: str, version: int, made_by: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What `save_model` was given. Costs no memory: the arrays are views of the file."""
    path = Path(path)
    wrong = f"{path}: not a {kind} that this version reads"
    fix = f"train one with {made_by}"
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= min(size_bytes, _LONGEST_HEADER) else {}
        about = json.loads(header["__metadata__"]["bessemer"])
        found = (about["kind"], about["version"])
        if found != (kind, version):
            raise UserError(f"{wrong} (it holds a {found[0]} of version {found[1]}); {fix}")
        del header["__metadata__"]
        arrays = {name: _mapped(path, entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {fix}, or correct the path of the model") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{wrong} ({type(error).__name__}: {error}); {fix}") from error
    return about, arrays


def _mapped(path: Path, entry: Mapping[str, Any], data_at: int) -> npt.NDArray[Any]:
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if stop - start != dtype.itemsize * int(np.prod(shape)):
        raise ValueError("its header contradicts itself")
    if start == stop:
        return np.empty(shape, dtype)  # nothing cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", offset=data_at + start, shape=shape).view(np.ndarray)


def file_identity(path: str | Path) -> str:
    """A hash of a file's content, for the keys of results that depend on it; 2 GB/s and more from memory."""
    if not os.path.isfile(path) and os.path.exists(path):  # opening a pipe waits for ever
        raise UserError(f"{path}: no regular file; correct the path")
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); correct the path") from error
