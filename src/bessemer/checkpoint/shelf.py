"""The shelf: a run's checkpoints, saved, listed, loaded and thinned out.

Shards go straight to `step-N.aK/` (K counts attempts at that step: after a rollback the same step is saved again, and
object stores cannot rename). The manifest makes it a checkpoint. Saving is synchronous here: for 1.3M parameters on a
CPU it takes 0.1 s, less than asynchronous staging would.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from bessemer.checkpoint.manifest import (
    NAME,
    Damaged,
    Manifest,
    commit,
    describe_files,
    discard,
    read_manifest,
    verify,
)
from bessemer.errors import UserError

_NAME = re.compile(r"^step-(\d{8,})\.a(\d+)$")
State = dict[str, Tensor]


def _key(folder: Path) -> tuple[int, int]:
    match = _NAME.match(folder.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _best(checkpoints: list[tuple[Path, Manifest]]) -> Path | None:
    scored = [(manifest.validation_loss, path) for path, manifest in checkpoints]
    known = [(loss, path) for loss, path in scored if loss is not None and math.isfinite(loss)]
    return min(known, key=lambda item: item[0])[1] if known else None


def _cause(error: BaseException) -> BaseException:
    """What went wrong inside DCP, without its tracebacks. torch calls a full disk "unexpected pos 704 vs 598"."""
    failures = list(getattr(error, "failures", {}).values())
    first: BaseException = failures[0][0] if failures else error
    link: BaseException | None = first
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link or first


@contextmanager
def _single_process() -> Iterator[None]:
    """DCP warns that there is no process group; with one process that is as it should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class Shelf:
    """The checkpoints folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _attempts(self) -> list[Path]:
        return sorted((path for path in self.folder.iterdir() if _NAME.match(path.name)), key=_key)

    def committed(self) -> list[tuple[Path, Manifest]]:
        """Checkpoints with a readable manifest, oldest first. Their files are not hashed here."""
        result = []
        for path in self._attempts():
            try:
                result.append((path, read_manifest(path)))
            except Damaged:
                continue
        return result

    def sweep(self) -> list[str]:
        """Remove what killed saves left behind (no manifest: never a checkpoint)."""
        leftovers = [path for path in self._attempts() if not (path / NAME).exists()]
        for path in leftovers:
            shutil.rmtree(path)
        return [path.name for path in leftovers]

    def save(self, state: State, manifest: Manifest) -> Path:
        """Write the tensors, hash the files, commit.

        Raises OSError with the folder in it if the disk refuses; what was written is removed, since a full disk is the
        usual cause.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        attempt = 1 + max((a for s, a in map(_key, self._attempts()) if s == manifest.step), default=0)
        folder = self.folder / f"step-{manifest.step:08d}.a{attempt}"
        try:
            with _single_process():
                writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
                dcp.save(state, storage_writer=writer, no_dist=True)
            commit(folder, replace(manifest, attempt=attempt, files=describe_files(folder)))
        except (
            OSError,
            CheckpointException,
        ) as error:  # the latter is a BaseException: no `except Exception` sees it
            with suppress(OSError):
                discard(folder)
            raise OSError(f"{folder}: the save failed: {_cause(error)}") from error
        return folder

    def load(self, folder: Path, state: State) -> Manifest:
        """Verify every file, then fill the given tensors in place.

        Raises Damaged for a bad file, and UserError where a sound checkpoint belongs to another model.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from bessemer.checkpoint.safe_reader import TensorReader

        manifest = verify(folder)
        reader = TensorReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        for name, tensor in state.items():
            if name not in saved:
                raise UserError(
                    f"{folder}: has no tensor {name}: it is of another model; "
                    "put the spec's model back, or name a new run"
                )
            size = tuple(saved[name].size)  # type: ignore[union-attr]
            if size != tuple(tensor.shape):
                raise UserError(
                    f"{folder}: tensor {name} has shape {size}, the model asks for {tuple(tensor.shape)}: "
                    "put the spec's model back, or name a new run"
                )
        try:
            with _single_process():
                dcp.load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise Damaged(f"{folder}: {_cause(error)}") from error
        return manifest

    def newest_first(self) -> Iterator[Path]:
        """Folders worth trying to load: those with a manifest, even one that proves unreadable when it is tried."""
        return (path for path in reversed(self._attempts()) if (path / NAME).exists())

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss; one that is not a number is no score."""
        return _best(self.committed())

    def thin(self, newest: Path, keep_last: int, keep_best: bool) -> list[str]:
        """Delete all but the last `keep_last` up to `newest`, the one just saved, and the best; the names of the rest.

        Checkpoints of later steps go too: the run went on from before them, so they are damaged or abandoned.
        """
        committed = self.committed()
        past = [(path, manifest) for path, manifest in committed if _key(path) <= _key(newest)]
        kept = {path for path, _ in past[-keep_last:]}
        if keep_best and (best := _best(past)):
            kept.add(best)
        gone = [path for path, _ in committed if path not in kept]
        for path in gone:
            discard(path)
        return [path.name for path in gone]
