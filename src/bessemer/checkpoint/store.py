"""Weights that were saved as bf16 and the 16 bits that it lacks (`optimizer.NAME.remainder`), read as whole fp32 by who
keeps them so, and the other way round. What the bits mean is said in `optim/low_memory.py`.

Which checkpoints stay: the rules of the spec, and the few that no rule may delete. The shelf does the deleting.

Who else saves and loads the same checkpoint.

The shelf: a run's checkpoints, saved, listed, loaded and thinned out.

Shards go straight to `step-N.aK/` (K counts attempts at that step: after a rollback the same step is saved again, and
object stores cannot rename). The manifest makes it a checkpoint. `model-N.aK/` holds the weights alone: it can be used
and evaluated, but no run resumes from it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bessemer.checkpoint.manifest import (
    CONFIRMED,
    DISCARDED,
    NAME,
    DamagedCheckpoint,
    Manifest,
    commit,
    discard,
    read_manifest,
    verify,
)
from bessemer.errors import UserError
from bessemer.spec.schema import CheckpointSpec
from bessemer.storage import sync_path

HIGH = -0x10000  # the upper half of 32 bits


def split_weight_remainders(
    saved: Collection[str], state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """What to read instead of `state` where the two keep weights in different ways, and what to do then."""
    asked, split, whole = dict(state), list[str](), list[str]()
    for name, tensor in state.items():
        rest = _rest(name)
        if not name.startswith("model.") or (rest in saved) == (rest in state):
            continue
        asked[name] = torch.empty_like(tensor, dtype=torch.float32)
        if rest in saved:
            asked[rest] = torch.empty_like(tensor, dtype=torch.int16)
            split.append(name)
        else:
            del asked[rest]
            whole.append(name)

    def finish() -> None:
        for name in split:
            bits = asked[name].view(torch.int32) + asked[_rest(name)].to(torch.int32)
            state[name].copy_(bits.view(torch.float32))
        for name in whole:
            bits = asked[name].view(torch.int32)
            high = (bits + 0x8000) & HIGH
            state[name].copy_(high.view(torch.float32))
            state[_rest(name)].copy_(bits - high)

    return asked, finish


def _rest(name: str) -> str:
    return f"optimizer.{name.removeprefix('model.')}.remainder"


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint as retention sees it."""

    name: str
    step: int
    attempt: int
    time: float
    bytes: int
    validation_loss: float | None = None
    confirmed: bool = False


def best_of(entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    """The lowest validation loss, the earliest of equals; a loss that is not a number is no score."""
    scored = [
        (entry.validation_loss, entry)
        for entry in entries
        if entry.validation_loss is not None and math.isfinite(entry.validation_loss)
    ]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def keep(
    entries: Sequence[CheckpointEntry],
    rules: CheckpointSpec,
    newest: str,
    now: float,
    protected: Collection[str] = (),
    confirming: bool = False,
) -> set[str]:
    """Names of the checkpoints that stay, of `entries` in any order. `newest` is the one just saved.

    Never deleted: the newest, the newest confirmed, the best where the spec asks for it, and the `protected` (tagged,
    or being uploaded). While the guard is `confirming`, the oldest unconfirmed one since then stays too: it is the next
    to be confirmed, and without it frequent saves would push every candidate out before its time.

    Checkpoints of later steps than the newest go: the run went on from before them, so they are damaged or abandoned.
    """
    order = sorted(entries, key=lambda entry: (entry.step, entry.attempt))
    end = next((i for i, entry in enumerate(order) if entry.name == newest), None)
    if end is None:  # a listing that lags behind: nothing is decided on it
        return {entry.name for entry in order}
    past = order[: end + 1]
    must = {newest} | {entry.name for entry in order if entry.name in protected}
    confirmed = [i for i, entry in enumerate(past) if entry.confirmed]
    if confirmed:
        must.add(past[confirmed[-1]].name)
    if confirming:
        since = confirmed[-1] + 1 if confirmed else 0
        must |= {entry.name for entry in past[since : since + 1]}
    if rules.keep_best and (best := best_of(past)):
        must.add(best.name)
    wanted = must | {entry.name for entry in past[-rules.keep_last :]}
    if rules.keep_every and not rules.archive_model_only:
        wanted |= _first_of_each(past, rules.keep_every)
    if rules.keep_age:
        wanted |= {entry.name for entry in past if now - entry.time <= rules.keep_age}
    if rules.keep_bytes:
        total = sum(entry.bytes for entry in order if entry.name in wanted)
        for entry in past:  # the oldest go first
            if total > rules.keep_bytes and entry.name in wanted - must:
                wanted.remove(entry.name)
                total -= entry.bytes
    return wanted


def _first_of_each(past: Sequence[CheckpointEntry], every: int) -> set[str]:
    """The last attempt at the first step saved in each `every` steps; saves need not fall on its multiples."""
    first: dict[int, CheckpointEntry] = {}
    for entry in past:
        stretch = entry.step // every
        if stretch and (stretch not in first or first[stretch].step == entry.step):
            first[stretch] = entry
    return {entry.name for entry in first.values()}


Word = TypeVar("Word")


class SavingPeers(Protocol):
    """The processes of a run, as far as checkpoints are concerned; see `parallel/world.py`."""

    size: int
    saving: Any  # a process group for the thread that writes

    @property
    def main(self) -> bool: ...
    def agree(self, word: Word) -> Word: ...
    def gather(self, word: Word, saving: bool = False) -> list[Word]: ...


class SingleProcess:
    """One process."""

    size, saving, main = 1, None, True

    def agree(self, word: Word) -> Word:
        return word

    def gather(self, word: Word, saving: bool = False) -> list[Word]:
        return [word]


_NAME = re.compile(r"^(step|model)-(\d{8,})\.a(\d+)$")
DOWNLOAD = ".download-"  # how the name of a folder begins that is not yet a checkpoint of this shelf
TAGS = "tags.json"
MODEL = "model."  # how the names of the weights begin
State = dict[str, Tensor]


def _key(folder: Path) -> tuple[int, int]:
    match = _NAME.match(folder.name)
    return (int(match[2]), int(match[3])) if match else (-1, -1)


def entry_of(name: str, manifest: Manifest, confirmed: bool) -> CheckpointEntry:
    loss = manifest.validation_loss
    return CheckpointEntry(name, manifest.step, manifest.attempt, manifest.time, manifest.bytes, loss, confirmed)


def _cause(error: BaseException) -> BaseException:
    """What went wrong inside DCP, without its tracebacks. torch calls a full disk "unexpected pos 704 vs 598"."""
    failures = list(getattr(error, "failures", {}).values())
    first: BaseException = failures[0][0] if failures else error
    link: BaseException | None = first
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link or first


def _lost(folder: Path, saved: Collection[str]) -> bool:
    """Whether a folder without a manifest was a checkpoint, and nobody has begun to delete it."""
    return folder.name in saved and not (folder / DISCARDED).exists() and any(folder.iterdir())


def single_process() -> None:
    """DCP warns that there is no process group; with one process that is as it should be. The filter stands for good:
    `catch_warnings` would restore the filters of all threads, and saves run in one of their own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointStore:
    """The checkpoints folder of one run. Deleting and confirming may be asked for from different threads."""

    def __init__(self, folder: Path, peers: SavingPeers | None = None) -> None:
        self.folder, self.peers = folder, peers or SingleProcess()
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)

    def _attempts(self, kind: str = "step") -> list[Path]:
        return sorted((path for path in self.folder.glob(f"{kind}-*") if _NAME.match(path.name)), key=_key)

    def committed(self, kind: str = "step") -> list[tuple[Path, Manifest]]:
        """Checkpoints with a readable manifest, oldest first. Their files are not hashed here.

        `kind` "model" lists the copies of weights alone instead.
        """
        result = []
        for path in self._attempts(kind):
            try:
                result.append((path, read_manifest(path)))
            except DamagedCheckpoint:
                continue
        return result

    def sweep(self, saved: Collection[str] = ()) -> list[str]:
        """Remove what killed saves, deletions and downloads left behind: without a manifest it is not a checkpoint.

        One of the `saved`, which were committed, has lost its manifest since: it stays, for someone to look at.
        """
        attempts = self._attempts("step") + self._attempts("model")
        leftovers = [path for path in attempts if not (path / NAME).exists() and not _lost(path, saved)]
        leftovers += self.folder.glob(f"{DOWNLOAD}*")
        for path in leftovers:
            shutil.rmtree(path)
        return [path.name for path in leftovers]

    def reserve(self, step: int, kind: str = "step") -> Path:
        """The folder of the next attempt to save a step; it is made by `write`."""
        attempt = 1 + max((a for s, a in map(_key, self._attempts(kind)) if s == step), default=0)
        return self.folder / f"{kind}-{step:08d}.a{self.peers.agree(attempt)}"

    def save(self, state: State, manifest: Manifest) -> Path:
        """Reserve and write."""
        folder = self.reserve(manifest.step)
        self.write(folder, state, manifest)
        return folder

    def without_manifest(self) -> list[Path]:
        """Folders of checkpoints that have none; after a sweep, those that lost it."""
        return [path for path in self._attempts() if not (path / NAME).exists()]

    def write(
        self, folder: Path, state: State, manifest: Manifest, beside: Callable[[], Mapping[str, bytes]] | None = None
    ) -> Manifest:
        """Write the tensors and, in the first process, the files of `beside`, read them back, commit; the manifest as
        committed.

        Raises OSError with the folder in it if the disk refuses; what was written is removed, since a full disk is the
        usual cause.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from bessemer.checkpoint.dcp import CheckedWriter

        on_host = all(tensor.device.type == "cpu" for tensor in state.values())
        peers = self.peers
        single_process()
        # Each process writes, reads back and hashes its own files; the first commits when all have done so.
        files: dict[str, dict[str, Any]] = {}
        fault: BaseException | None = None
        try:
            writer = CheckedWriter(folder, copy_ahead_bytes=0 if on_host else 10_000_000)
            dcp.save(state, storage_writer=writer, no_dist=peers.size == 1, process_group=peers.saving)
            for name, content in (beside() if beside and peers.main else {}).items():
                writer.add(name, content)
            files = writer.read_back()
        except (OSError, CheckpointException) as error:  # a BaseException: no `except Exception` sees it
            fault = _cause(error)
        everyone = peers.gather((files, str(fault) if fault else ""), saving=True)
        faults = [words for _, words in everyone if words]
        complete = replace(
            manifest, attempt=_key(folder)[1], files={name: at for found, _ in everyone for name, at in found.items()}
        )
        if not faults and peers.main:
            try:
                commit(folder, complete)
            except OSError as error:
                fault, faults = error, [str(error)]
        if peers.size > 1:
            faults = peers.gather(faults, saving=True)[0]
        if faults:
            if peers.main:
                with suppress(OSError):
                    discard(folder)
            raise OSError(f"{folder}: the save failed: {faults[0]}") from fault
        return complete

    def write_model(self, state: State, manifest: Manifest, every: int) -> Path | None:
        """A copy of the weights alone, the first of every `every` steps; None where it is not due."""
        stretch = manifest.step // every
        if not stretch or any(_key(path)[0] // every == stretch for path, _ in self.committed("model")):
            return None
        weights = {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}
        folder = self.reserve(manifest.step, "model")
        self.write(folder, weights, replace(manifest, content="model"))
        return folder

    def load(self, folder: Path, state: State, optional: Collection[str] = ()) -> Manifest:
        """Verify every file, then fill the given tensors in place. Those in `optional` may be missing, and then stay.

        Raises Damaged for a bad file, and UserError where a sound checkpoint belongs to another model.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from bessemer.checkpoint.dcp import TensorReader

        manifest = verify(folder)
        reader = TensorReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        state = {name: tensor for name, tensor in state.items() if name in saved or name not in optional}
        asked, finish = split_weight_remainders(saved, state)
        for name, tensor in asked.items():
            part = "optimizer and memory sections" if name.startswith("optimizer.") else "model"
            fix = f"put the spec's {part} back, or name a new run"
            if name not in saved:
                raise UserError(f"{folder}: has no tensor {name}, which the spec asks for: {fix}")
            size, held = tuple(saved[name].size), saved[name].properties.dtype  # type: ignore[union-attr]
            if size != tuple(tensor.shape):
                raise UserError(
                    f"{folder}: tensor {name} has shape {size}, the model asks for {tuple(tensor.shape)}: {fix}"
                )
            # Between kinds of floats torch converts; codes and bits would be taken for numbers.
            if held != tensor.dtype and not (held.is_floating_point and tensor.dtype.is_floating_point):
                raise UserError(f"{folder}: tensor {name} is {held}, the spec asks for {tensor.dtype}: {fix}")
        single_process()
        try:
            dcp.load(asked, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise DamagedCheckpoint(f"{folder}: {_cause(error)}") from error
        finish()
        return manifest

    def newest_first(self) -> Iterator[Path]:
        """Folders worth trying to load: those with a manifest, even one that proves unreadable when it is tried."""
        return (path for path in reversed(self._attempts()) if (path / NAME).exists())

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss; one that is not a number is no score."""
        best = best_of(self._entries())
        return self.folder / best.name if best else None

    def confirm(self, folder: Path) -> bool:
        """Note for good that the run went on well from here; False if the checkpoint is no longer there."""
        with self._lock:
            if not (folder / NAME).exists():
                return False
            (folder / CONFIRMED).touch()
            sync_path(folder)
            return True

    def confirmed(self) -> list[Path]:
        """Confirmed checkpoints, newest first: what a rollback may go to."""
        return [path for path in self.newest_first() if (path / CONFIRMED).exists()]

    def tagged(self) -> set[str]:
        """Names that a person gave a tag; they are never deleted here."""
        with suppress(FileNotFoundError, ValueError, AttributeError):
            return set(map(str, json.loads((self.folder / TAGS).read_text(encoding="utf-8")).values()))
        return set()

    def abandon(self, after_step: int) -> list[str]:
        """After a rollback to `after_step`, delete what was saved later, so that no restart resumes from it.

        Tagged ones stay, and so does everything where nothing older is left: a doubtful state is better than none.
        """
        with self._lock:
            committed, tagged = self.committed(), self.tagged()
            if all(manifest.step > after_step for _, manifest in committed):
                return []
            late = [path for path, found in committed + self.committed("model") if found.step > after_step]
            return self._delete([path for path in late if path.name not in tagged])

    def thin(
        self, newest: Path, rules: CheckpointSpec, protected: Collection[str] = (), confirming: bool = False
    ) -> list[str]:
        """Delete what the rules do not keep (see `retention.keep`) now that `newest` is saved; the names."""
        with self._lock:
            entries = self._entries()
            protected = {*protected, *self.tagged()}
            kept = keep(entries, rules, newest.name, time.time(), protected, confirming)
            gone = [self.folder / entry.name for entry in entries if entry.name not in kept]
            # Copies of weights from steps that the run went back from are abandoned too.
            gone += [path for path in self._attempts("model") if _key(path) > _key(newest)]
            return self._delete([path for path in gone if path.name not in protected])

    def _delete(self, folders: list[Path]) -> list[str]:
        for path in folders:
            discard(path)
        return [path.name for path in folders]

    def _entries(self) -> list[CheckpointEntry]:
        return [entry_of(path.name, found, (path / CONFIRMED).exists()) for path, found in self.committed()]
