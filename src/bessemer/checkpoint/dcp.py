"""torch's distributed checkpoint format (DCP), without trusting its pickle or the disk.

Reading: DCP's index (`.metadata`) is a pickle, which can run code. Here an unpickler that knows only DCP's data classes
reads it, and an index with anything but tensors is refused.

Writing: each file is hashed while it is written. After fsync the kernel's cached copy is dropped (POSIX_FADV_DONTNEED;
O_DIRECT's alignment rules differ between file systems) and the file is hashed again as the disk returns it: a hash
taken only from the file would confirm whatever a bad disk, cable or file server made of it.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from bessemer.checkpoint.manifest import DamagedCheckpoint, hash_file
from bessemer.storage import sync_file

# All names in an index of tensors, as torch 2.11 and 2.13 write it: plain data classes except the last two lines.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),  # the index
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),  # a tensor: properties, size, chunks
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),  # dtype, layout, memory format
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),  # an enum: the memory format's number
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),  # offsets and sizes of one chunk
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),  # the key of a chunk
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),  # folder and id of the save
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),  # file, offset and length of a chunk
    ("torch", "Size"),  # a tuple of integers
    ("torch.serialization", "_get_layout"),  # looks up a layout by name
}
# The folder of the save, which is not used: a pure path cannot access files. Only Python 3.13 writes `pathlib._local`.
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


class _IndexUnpickler(pickle.Unpickler):
    """Allows DCP's data classes and torch's dtypes; any other name is refused before anything runs."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise DamagedCheckpoint(
            f"{self._path}: refers to {module}.{name}, which no Bessemer checkpoint does; it was not loaded"
        )


class TensorReader(FileSystemReader):
    """torch's reader with a safe index; torch reads the tensors themselves with weights_only."""

    unpickler: type[_IndexUnpickler] = _IndexUnpickler
    skip_objects = False  # ignore entries that are not tensors, instead of refusing the index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = self.unpickler(io.BytesIO(path.read_bytes()), path).load()
        except DamagedCheckpoint:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise DamagedCheckpoint(f"{path}: unreadable index: {error}") from None
        if not isinstance(metadata, Metadata):
            raise DamagedCheckpoint(f"{path}: is not a checkpoint index")
        entries = metadata.state_dict_metadata
        objects = [key for key, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
        if objects and not self.skip_objects:
            raise DamagedCheckpoint(f"{path}: entry {objects[0]!r} is not a tensor; it was not loaded")
        for key in objects:
            del entries[key]
        for chunk in (metadata.storage_data or {}).values():
            name = str(getattr(chunk, "relative_path", chunk))
            if Path(name).name != name:
                raise DamagedCheckpoint(f"{path}: points outside its folder, to {name}; it was not loaded")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _HashedStream:
    """A file being written, with the hash of its content. The opener closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self.bytes = file, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        count = self._file.write(data)
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        """For fsync. DCP calls it with the index still in Python's buffer, so that is flushed first."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.flush()

    def hash(self) -> str:
        return str(self._digest.hexdigest())


class _HashedFiles(FileSystem):
    """The local file system under a DCP writer; records size and hash of every file by name."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open("wb") as file:
            stream = _HashedStream(file)
            yield stream
        self.written[Path(path).name] = {"bytes": stream.bytes, "xxh3_128": stream.hash()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class CheckedWriter(FileSystemWriter):
    """One file per rank, hashed while it is written.

    `copy_ahead_bytes` is how far tensors are fetched from the device ahead of the disk. It must be 0 for tensors in
    host memory: DCP would otherwise wait for the device's current stream, which belongs to training.
    """

    def __init__(self, folder: Path, copy_ahead_bytes: int) -> None:
        super().__init__(folder, single_file_per_rank=True, per_thread_copy_ahead=copy_ahead_bytes)
        self._files = _HashedFiles()
        self.fs = self._files

    def add(self, name: str, content: bytes) -> None:
        """Add a file without tensors."""
        with self._files.create_stream(Path(str(self.path)) / name, "wb") as stream:
            stream.write(content)
            sync_file(stream)

    def read_back(self) -> dict[str, dict[str, Any]]:
        """Size and hash of every file, compared with the disk's content; OSError names one that differs."""
        for name, written in self._files.written.items():
            path = Path(str(self.path)) / name
            if path.stat().st_size != written["bytes"] or hash_file(path, from_disk=True) != written["xxh3_128"]:
                raise OSError(errno.EIO, "the data read back differs from the data written", str(path))
        return dict(sorted(self._files.written.items()))
