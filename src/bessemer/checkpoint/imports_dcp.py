"""torch DCP folders of other programs (FSDP, torchtitan, accelerate): their tensors, without their pickles.

Such a folder may hold objects beside tensors (schedulers, counters), each a pickle of its own. They are left out of the
index here, so that nothing ever asks for their bytes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from bessemer.checkpoint.manifest import Damaged
from bessemer.checkpoint.safe_reader import TensorReader, _IndexUnpickler


class _ForeignUnpickler(_IndexUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"):
            return BytesStorageMetadata  # an empty data class that marks an entry as an object
        return super().find_class(module, name)


class ForeignReader(TensorReader):
    """The safe reader for an index that names objects too: it knows only the tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = _ForeignUnpickler(io.BytesIO(path.read_bytes()), path).load()
            kept = {
                name: entry
                for name, entry in metadata.state_dict_metadata.items()
                if not isinstance(entry, BytesStorageMetadata)
            }
            places = {str(place.relative_path) for place in metadata.storage_data.values()}
        except Damaged:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise Damaged(f"{path}: unreadable index: {error}") from None
        if outside := sorted(name for name in places if Path(name).name != name):
            raise Damaged(f"{path}: points outside its folder, to {outside[0]}; it was not loaded")
        return Metadata(kept, storage_data=metadata.storage_data, storage_meta=StorageMeta(load_id=self.load_id))
