"""Reads torch DCP without trusting its pickle.

DCP keeps its index (`.metadata`) as a pickle, which runs code when loaded. Here it goes through an unpickler that knows
only DCP's own data classes, and an index that names anything but tensors is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from bessemer.checkpoint.manifest import Damaged

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("torch._utils", "_rebuild_device"),
    ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"), ("pathlib._local", "Path"),
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Admits DCP's data classes and torch's own dtypes; any other name is refused before anything runs."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
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
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = self.storage_meta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata
