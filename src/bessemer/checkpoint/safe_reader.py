"""Reads torch DCP without trusting its pickle.

DCP keeps its index (`.metadata`) as a pickle, which runs code when loaded. Here it goes through an unpickler that knows
only DCP's own data classes, and an index that names anything but tensors is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from bessemer.checkpoint.manifest import Damaged

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
        raise Damaged(f"{self._path}: refers to {module}.{name}, which no checkpoint of ours does; it was not loaded")


class TensorReader(FileSystemReader):
    """torch's reader with a safe index; tensors themselves are read by torch with weights_only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = _IndexUnpickler(io.BytesIO(path.read_bytes()), path).load()
        except Damaged:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise Damaged(f"{path}: unreadable index: {error}") from None
        if not isinstance(metadata, Metadata):
            raise Damaged(f"{path}: is not a checkpoint index")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise Damaged(f"{path}: entry {key!r} is not a tensor; it was not loaded")
        for place in (metadata.storage_data or {}).values():
            name = str(getattr(place, "relative_path", place))
            if Path(name).name != name:
                raise Damaged(f"{path}: points outside its folder, to {name}; it was not loaded")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
