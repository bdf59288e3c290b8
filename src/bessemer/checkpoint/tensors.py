"""A checkpoint's tensors one at a time, and checkpoints of weights alone: shared by averages, archives and imports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from bessemer.checkpoint.checked_writer import CheckedWriter
from bessemer.checkpoint.manifest import Damaged, Manifest, commit
from bessemer.checkpoint.safe_reader import TensorReader
from bessemer.checkpoint.shelf import MODEL, Shelf, _cause, single_process


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder, each read from disk when it is asked for: the memory held is one tensor's.

    The index is read once: at 1,000 ranks it is larger than many a tensor. Files are not hashed here; verify first.
    """

    def __init__(self, folder: Path, prefix: str = "", reader: TensorReader | None = None) -> None:
        self.folder, self._prefix = folder, prefix
        self._reader = reader or TensorReader(folder)
        index = self._reader.read_metadata()
        self._reader.read_metadata = lambda *args, **kwargs: index  # type: ignore[method-assign]
        self._entries: dict[str, Any] = {
            name.removeprefix(prefix): entry
            for name, entry in index.state_dict_metadata.items()
            if name.startswith(prefix)
        }

    def __getitem__(self, name: str) -> Tensor:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        single_process()
        try:
            dcp.load({self._prefix + name: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException: no `except Exception` sees it
            cause = _cause(error)
            what = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise Damaged(f"{self.folder}: tensor {name} cannot be read: {what}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def blank(self) -> dict[str, Tensor]:
        """All of them by name, without their data."""
        entries = self._entries.items()
        return {name: torch.empty(e.size, dtype=e.properties.dtype, device="meta") for name, e in entries}


def save_model(
    shelf: Path,
    weights: Mapping[str, Tensor],
    made_from: dict[str, Any],
    like: Manifest | None = None,
    loss: float | None = None,
) -> Path:
    """A checkpoint of weights alone, `model-N.aK`, with what it was made from in its manifest.

    `like` gives it the step and fingerprints of a run; without one it is step 0, for a new run to start from.
    """
    place, manifest = Shelf(shelf), _manifest(made_from, like, loss)
    folder = place.reserve(manifest.step, "model")
    place.write(folder, {MODEL + name: tensor.contiguous() for name, tensor in weights.items()}, manifest)
    return folder


def _manifest(made_from: dict[str, Any], like: Manifest | None = None, loss: float | None = None) -> Manifest:
    manifest = like or Manifest(
        step=0, attempt=0, stream_fingerprint="", stream={}, spec_fingerprint="", segments=[], batch_rows=[],
        progress={}, threads=torch.get_num_threads(), device="cpu", versions={"torch": torch.__version__}, time=0.0,
    )  # fmt: skip
    return replace(
        manifest, content="model", progress={"made_from": made_from}, time=time.time(), validation_loss=loss,
        stream_state=None, guard={},
    )  # fmt: skip


class _OneByOne(DefaultSavePlanner):
    """Plans from tensors without data; each is read when its turn to be written comes, in their order."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(MODEL)).contiguous()


def stream_model(
    shelf: Path, blank: Mapping[str, Tensor], read: Callable[[str], Tensor], made_from: dict[str, Any]
) -> Path:
    """As `save_model`, for weights that no memory holds: `read` is asked for one after another.

    A failure leaves files without a manifest: no checkpoint.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    folder = Shelf(shelf).reserve(0, "model")
    writer = CheckedWriter(folder, copy_ahead_bytes=0)
    single_process()
    try:
        planner, names = _OneByOne(read), {MODEL + name: tensor for name, tensor in blank.items()}
        dcp.save(names, storage_writer=writer, planner=planner, no_dist=True)
        commit(folder, replace(_manifest(made_from), attempt=1, files=writer.read_back()))
    except CheckpointException as error:  # a BaseException: no `except Exception` sees it
        raise _cause(error) from error
    return folder
