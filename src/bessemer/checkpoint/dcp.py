"""Reads torch DCP without trusting its pickle.

DCP keeps its index (`.metadata`) as a pickle, which runs code when loaded. Here it goes through an unpickler that knows
only DCP's own data classes, and an index that names anything but tensors is refused.

torch's DCP writer, checked: what reached the disk is read back and compared with what left the memory.

A hash that is first taken from the file would vouch for whatever a bad disk, cable or file server made of it. Here each
file is hashed on its way out; after fsync the kernel's copy is dropped (POSIX_FADV_DONTNEED: O_DIRECT has alignment
rules that differ between file systems) and the file is hashed again, as the disk or the server gives it back. That is
one read of what was written, and none of it stands in the loop's way when the save is asynchronous.

What asynchronous saves are made of: a copy of the state that training cannot touch, and a thread to write it.

A thread and not a process: torch's writing, hashing and fsync leave Python's lock to the training (the longest gap that
a loop saw while 400 MB were written was 18 ms), and the copy needs no shared memory. It is a daemon, so that leaving at
once means at once: an unfinished save has no manifest and is swept at the next start.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from bessemer.checkpoint.manifest import DamagedCheckpoint, hash_file
from bessemer.dtensor import is_dtensor
from bessemer.storage import sync_file

# All that an index of tensors names, as torch 2.11 and 2.13 write it. Plain data classes but for the last two lines.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),  # the whole
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),  # a tensor: properties, size, chunks
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),  # dtype, layout, memory format
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),  # an enum: the memory format's number
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),  # offsets and sizes of one chunk
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),  # the key of a chunk
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),  # where and under which id it was saved
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),  # file, offset and length of a chunk
    ("torch", "Size"),  # a tuple of integers
    ("torch.serialization", "_get_layout"),  # a table look-up from a layout's name
}
# The folder it was saved to, which nothing here reads: a pure path has no file system behind it. Python 3.13 alone says
# `pathlib._local`, which other versions do not have.
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


class _IndexUnpickler(pickle.Unpickler):
    """Admits DCP's data classes and torch's own dtypes; any other name is refused before anything runs."""

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
            f"{self._path}: refers to {module}.{name}, which no checkpoint of ours does; it was not loaded"
        )


class TensorReader(FileSystemReader):
    """torch's reader with a safe index; tensors themselves are read by torch with weights_only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = _IndexUnpickler(io.BytesIO(path.read_bytes()), path).load()
        except DamagedCheckpoint:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise DamagedCheckpoint(f"{path}: unreadable index: {error}") from None
        if not isinstance(metadata, Metadata):
            raise DamagedCheckpoint(f"{path}: is not a checkpoint index")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise DamagedCheckpoint(f"{path}: entry {key!r} is not a tensor; it was not loaded")
        for place in (metadata.storage_data or {}).values():
            name = str(getattr(place, "relative_path", place))
            if Path(name).name != name:
                raise DamagedCheckpoint(f"{path}: points outside its folder, to {name}; it was not loaded")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _HashedStream:
    """A file being written that knows the hash of what was written to it. Whoever opened the file closes it."""

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
        """For fsync. DCP calls it with the whole index still in Python's buffer, so that goes out first."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.flush()

    def hash(self) -> str:
        return str(self._digest.hexdigest())


class _HashedFiles(FileSystem):
    """The local file system under a DCP writer; notes size and hash of every file by its name."""

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
    """One file a rank, each hashed while it is written.

    `copy_ahead_bytes` is how far tensors are fetched from the device ahead of the disk. For tensors in host memory it
    must be 0: DCP would wait for the device's current stream, which belongs to the training.
    """

    def __init__(self, folder: Path, copy_ahead_bytes: int) -> None:
        super().__init__(folder, single_file_per_rank=True, per_thread_copy_ahead=copy_ahead_bytes)
        self._files = _HashedFiles()
        self.fs = self._files

    def add(self, name: str, content: bytes) -> None:
        """One more file in the folder, which holds no tensor."""
        with self._files.create_stream(Path(str(self.path)) / name, "wb") as stream:
            stream.write(content)
            sync_file(stream)

    def read_back(self) -> dict[str, dict[str, Any]]:
        """Size and hash of every file, compared with what the disk holds; OSError names one that differs."""
        for name, written in self._files.written.items():
            path = Path(str(self.path)) / name
            if path.stat().st_size != written["bytes"] or hash_file(path, from_disk=True) != written["xxh3_128"]:
                raise OSError(errno.EIO, "what was read back differs from what was written", str(path))
        return dict(sorted(self._files.written.items()))


Result = TypeVar("Result")
State = dict[str, Tensor]


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a daemon thread; the future has its result or whatever it raised."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # DCP's exception is a BaseException
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _here(tensor: Tensor) -> Tensor:
    """What this process holds of it; the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def state_bytes(state: State) -> int:
    """Of what this process holds of it."""
    return sum(_here(tensor).numel() * tensor.element_size() for tensor in state.values())


class Staging:
    """Host copies of a state, in memory that is kept from save to save: to touch it for the first time takes ten times
    as long as to copy. For a GPU's tensors it is page-locked, which makes the copy several times as fast. Of a tensor
    that is divided among processes each copies its part, and the copy is a part of the same whole."""

    def __init__(self) -> None:
        self._held: State = {}

    @property
    def bytes(self) -> int:
        return state_bytes(self._held)

    def copy(self, state: State) -> State:
        """The copy is complete when this returns; it is overwritten by the next call."""
        for name, tensor in state.items():
            held = self._held.get(name)
            if held is None or not _alike(held, tensor):
                held = self._held[name] = _host_memory(tensor)
            _here(held).copy_(_here(tensor), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in state.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._held[name] for name in state}


def _alike(held: Tensor, tensor: Tensor) -> bool:
    places = [getattr(one, "placements", None) for one in (held, tensor)]
    return held.shape == tensor.shape and held.dtype == tensor.dtype and places[0] == places[1]


def _host_memory(tensor: Tensor) -> Tensor:
    memory = _locked(_here(tensor))
    if not is_dtensor(tensor):
        return memory
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # Built by hand: torch's own way would move it to the mesh's device.
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(memory, spec, requires_grad=False)


def _locked(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.is_cuda and memory.numel():
        # torch's own page-locked allocator rounds up to powers of two: up to twice the memory for a large model.
        cudart = torch.cuda.cudart()
        address, size = memory.data_ptr(), memory.numel() * memory.element_size()
        if int(cudart.cudaHostRegister(address, size, 1)) == 0:  # portable; if refused, the memory serves as it is
            weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return memory
