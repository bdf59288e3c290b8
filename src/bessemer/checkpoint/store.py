"""`CheckpointStore`: a run's checkpoints, saved, listed, loaded and deleted by the retention rules.

Shards are written directly to `step-N.aK/` (K counts attempts at that step: after a rollback the same step is saved
again, and object stores cannot rename). The manifest makes it a checkpoint. `model-N.aK/` holds weights only: it can be
used and evaluated, but no run resumes from it.

Also here: loading split weights (bf16 and the low 16 bits in `optimizer.NAME.remainder`, see `optim/low_memory.py`) as
fp32 and vice versa, and the retention rules.
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

from bessemer.checkpoint.base import CheckpointWeights, frozen_tensors
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
from bessemer.dtensor import copy_shard
from bessemer.errors import UserError
from bessemer.model.quantized import is_quantized
from bessemer.spec.schema import CheckpointSpec
from bessemer.storage import sync_path

HIGH_BITS = -0x10000  # the upper 16 of 32 bits


def convert_split_weights(
    saved: Collection[str], state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """What to load instead of `state` if the checkpoint stores weights in the other format, and a function that
    converts afterwards."""
    requested, to_join, to_split = dict(state), list[str](), list[str]()
    for name, tensor in state.items():
        remainder = remainder_name(name)
        if not name.startswith("model.") or (remainder in saved) == (remainder in state):
            continue
        requested[name] = torch.empty_like(tensor, dtype=torch.float32)
        if remainder in saved:
            requested[remainder] = torch.empty_like(tensor, dtype=torch.int16)
            to_join.append(name)
        else:
            del requested[remainder]
            to_split.append(name)

    def finish() -> None:
        for name in to_join:
            state[name].copy_(join_split_weight(requested[name], requested[remainder_name(name)]))
        for name in to_split:
            high, remainder = split_weight(requested[name])
            state[name].copy_(high)
            state[remainder_name(name)].copy_(remainder)

    return requested, finish


def join_split_weight(high: Tensor, remainder: Tensor) -> Tensor:
    """An fp32 weight from its bf16 part, as fp32, and the low 16 bits."""
    return (high.view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 part of an fp32 weight, as fp32, and the low 16 bits."""
    bits = weight.view(torch.int32)
    high = (bits + 0x8000) & HIGH_BITS
    return high.view(torch.float32), bits - high


def remainder_name(name: str) -> str:
    return f"optimizer.{name.removeprefix('model.')}.remainder"


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint as the retention rules see it."""

    name: str
    step: int
    attempt: int
    time: float
    bytes: int
    validation_loss: float | None = None
    confirmed: bool = False
    validation_score: float | None = None  # by default the loss


def best_checkpoint(entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    """The lowest validation score, of equal ones the lowest loss, and the earliest of these."""
    scored = []
    for entry in entries:
        loss = entry.validation_loss
        score = loss if entry.validation_score is None else entry.validation_score
        if loss is not None and score is not None and math.isfinite(loss) and math.isfinite(score):
            scored.append((score, loss, entry))
    return min(scored, key=lambda each: each[:2])[2] if scored else None


def keep(
    entries: Sequence[CheckpointEntry], rules: CheckpointSpec, newest: str, now: float,
    protected: Collection[str] = (), confirming: bool = False,
) -> set[str]:  # fmt: skip
    """Names of the checkpoints to keep, of `entries` in any order. `newest` is the one just saved.

    Never deleted: the newest, the newest confirmed, the best if the spec says so, and the `protected` (tagged, or being
    uploaded). While the guard is `confirming`, the oldest unconfirmed one since then is kept too: it is the next to be
    confirmed, and frequent saves would otherwise delete every candidate before its time.

    Checkpoints of later steps than the newest are deleted: the run continued from before them, so they are damaged or
    abandoned.
    """
    order = sorted(entries, key=lambda entry: (entry.step, entry.attempt))
    end = next((i for i, entry in enumerate(order) if entry.name == newest), None)
    if end is None:  # a stale listing: decide nothing
        return {entry.name for entry in order}
    history = order[: end + 1]
    required = {newest} | {entry.name for entry in order if entry.name in protected}
    confirmed = [i for i, entry in enumerate(history) if entry.confirmed]
    if confirmed:
        required.add(history[confirmed[-1]].name)
    if confirming:
        since = confirmed[-1] + 1 if confirmed else 0
        required |= {entry.name for entry in history[since : since + 1]}
    if rules.keep_best and (best := best_checkpoint(history)):
        required.add(best.name)
    names = required | {entry.name for entry in history[-rules.keep_last :]}
    if rules.keep_every and not rules.archive_model_only:
        names |= _first_of_each(history, rules.keep_every)
    if rules.keep_age:
        names |= {entry.name for entry in history if now - entry.time <= rules.keep_age}
    if rules.keep_bytes:
        total = sum(entry.bytes for entry in order if entry.name in names)
        for entry in history:  # oldest first
            if total > rules.keep_bytes and entry.name in names - required:
                names.remove(entry.name)
                total -= entry.bytes
    return names


def _first_of_each(history: Sequence[CheckpointEntry], every: int) -> set[str]:
    """The last attempt at the first step saved in each interval of `every` steps; saves need not fall on its
    multiples."""
    first: dict[int, CheckpointEntry] = {}
    for entry in history:
        interval = entry.step // every
        if interval and (interval not in first or first[interval].step == entry.step):
            first[interval] = entry
    return {entry.name for entry in first.values()}


Value = TypeVar("Value")


class SavingPeers(Protocol):
    """The processes of a run, as far as checkpoints need them; see `parallel/world.py`."""

    size: int
    saving: Any  # the process group of the saving thread

    @property
    def main(self) -> bool: ...
    def agree(self, value: Value) -> Value: ...
    def gather(self, value: Value, saving: bool = False) -> list[Value]: ...


class SingleProcess:
    size, saving, main = 1, None, True

    def agree(self, value: Value) -> Value:
        return value

    def gather(self, value: Value, saving: bool = False) -> list[Value]:
        return [value]


_NAME = re.compile(r"^(step|model)-(\d{8,})\.a(\d+)$")
DOWNLOAD = ".download-"  # name prefix of an unfinished download
TAGS = "tags.json"
MODEL = "model."  # name prefix of weights
State = dict[str, Tensor]


def _key(folder: Path) -> tuple[int, int]:
    match = _NAME.match(folder.name)
    return (int(match[2]), int(match[3])) if match else (-1, -1)


def entry_of(name: str, manifest: Manifest, confirmed: bool) -> CheckpointEntry:
    loss = manifest.validation_loss
    score = manifest.validation_score
    return CheckpointEntry(name, manifest.step, manifest.attempt, manifest.time, manifest.bytes, loss, confirmed, score)


def _cause(error: BaseException) -> BaseException:
    """The original error inside DCP's exception. torch calls a full disk "unexpected pos 704 vs 598"."""
    failures = list(getattr(error, "failures", {}).values())
    first: BaseException = failures[0][0] if failures else error
    link: BaseException | None = first
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link or first


def _lost_manifest(folder: Path, saved: Collection[str]) -> bool:
    """Whether a folder without a manifest was a checkpoint that is not being deleted."""
    return folder.name in saved and not (folder / DISCARDED).exists() and any(folder.iterdir())


def load_frozen(folder: Path, state: State) -> State:
    """Fill the tensors that the checkpoint leaves to its base; returns those that it holds itself."""
    frozen = frozen_tensors(folder)
    rest = dict(state)
    if frozen is None:
        return rest
    names = [name for name in frozen if MODEL + name in state]
    for name in names:
        target, remainder = rest.pop(MODEL + name), rest.pop(remainder_name(MODEL + name), None)
        tensor = frozen.original(name) if is_quantized(target) else frozen[name]
        if tensor.shape != target.shape:
            shapes = f"has shape {tuple(tensor.shape)}, the model asks for {tuple(target.shape)}"
            raise UserError(f"{folder}: tensor {name} {shapes}: put the spec's model back, or name a new run")
        if remainder is not None:
            tensor, low_bits = split_weight(tensor.float())
            copy_shard(remainder, low_bits)
        copy_shard(target, tensor)
    return rest


def load_quantized(folder: Path, state: State) -> State:
    """Fill tensors that are held in NF4 from a checkpoint that holds them in full, one at a time; returns the rest."""
    quantized = [name for name, target in state.items() if is_quantized(target)]
    saved = CheckpointWeights(folder) if quantized else {}
    for name in quantized:
        if (native := name.removeprefix(MODEL)) not in saved:
            raise UserError(f"{folder}: has no tensor {name}, which the spec asks for: put the spec's model back")
        copy_shard(state[name], saved[native])
    return {name: target for name, target in state.items() if name not in quantized}


def silence_single_process_warning() -> None:
    """DCP warns that there is no process group, which is normal for one process. The filter stays: `catch_warnings`
    would restore the filters of all threads, and saves run in their own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointStore:
    """The checkpoints folder of one run. Deleting and confirming are thread-safe."""

    def __init__(self, folder: Path, peers: SavingPeers | None = None) -> None:
        self.folder, self.peers = folder, peers or SingleProcess()
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)

    def _attempts(self, kind: str = "step") -> list[Path]:
        return sorted((path for path in self.folder.glob(f"{kind}-*") if _NAME.match(path.name)), key=_key)

    def committed(self, kind: str = "step") -> list[tuple[Path, Manifest]]:
        """Checkpoints with a readable manifest, oldest first. Does not hash their files.

        `kind` "model" lists the copies of weights only.
        """
        result = []
        for path in self._attempts(kind):
            try:
                result.append((path, read_manifest(path)))
            except DamagedCheckpoint:
                continue
        return result

    def sweep(self, saved: Collection[str] = ()) -> list[str]:
        """Remove what killed saves, deletions and downloads left behind: folders without a manifest.

        One of the `saved`, which were committed, has lost its manifest since then: it is kept for inspection.
        """
        attempts = self._attempts("step") + self._attempts("model")
        leftovers = [path for path in attempts if not (path / NAME).exists() and not _lost_manifest(path, saved)]
        leftovers += self.folder.glob(f"{DOWNLOAD}*")
        for path in leftovers:
            shutil.rmtree(path)
        return [path.name for path in leftovers]

    def reserve(self, step: int, kind: str = "step") -> Path:
        """The folder of the next attempt to save a step; `write` creates it."""
        attempt = 1 + max((a for s, a in map(_key, self._attempts(kind)) if s == step), default=0)
        return self.folder / f"{kind}-{step:08d}.a{self.peers.agree(attempt)}"

    def save(self, state: State, manifest: Manifest) -> Path:
        """Reserve and write."""
        folder = self.reserve(manifest.step)
        self.write(folder, state, manifest)
        return folder

    def without_manifest(self) -> list[Path]:
        """Checkpoint folders without a manifest; after a sweep, those that lost it."""
        return [path for path in self._attempts() if not (path / NAME).exists()]

    def write(
        self, folder: Path, state: State, manifest: Manifest, beside: Callable[[], Mapping[str, bytes]] | None = None
    ) -> Manifest:
        """Write the tensors and, on rank 0, the files of `beside`, read them back, commit; returns the committed
        manifest.

        Raises OSError with the folder's name if the disk refuses, and removes what was written, since a full disk is
        the usual cause.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from bessemer.checkpoint.dcp import CheckedWriter

        on_host = all(tensor.device.type == "cpu" for tensor in state.values())
        peers = self.peers
        silence_single_process_warning()
        # Each rank writes, reads back and hashes its own files; rank 0 commits when all have finished.
        files: dict[str, dict[str, Any]] = {}
        error: BaseException | None = None
        try:
            writer = CheckedWriter(folder, copy_ahead_bytes=0 if on_host else 10_000_000)
            dcp.save(state, storage_writer=writer, no_dist=peers.size == 1, process_group=peers.saving)
            for name, content in (beside() if beside and peers.main else {}).items():
                writer.add(name, content)
            files = writer.read_back()
        except (OSError, CheckpointException) as raised:  # a BaseException
            error = _cause(raised)
        gathered = peers.gather((files, str(error) if error else ""), saving=True)
        errors = [message for _, message in gathered if message]
        files = {name: entry for rank_files, _ in gathered for name, entry in rank_files.items()}
        complete = replace(manifest, attempt=_key(folder)[1], files=files)
        if not errors and peers.main:
            try:
                commit(folder, complete)
            except OSError as raised:
                error, errors = raised, [str(raised)]
        if peers.size > 1:
            errors = peers.gather(errors, saving=True)[0]
        if errors:
            if peers.main:
                with suppress(OSError):
                    discard(folder)
            raise OSError(f"{folder}: saving failed: {errors[0]}") from error
        return complete

    def write_model(self, state: State, manifest: Manifest, every: int) -> Path | None:
        """A copy of the weights only, for the first save in each interval of `every` steps; None if it is not due."""
        interval = manifest.step // every
        if not interval or any(_key(path)[0] // every == interval for path, _ in self.committed("model")):
            return None
        weights = {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}
        folder = self.reserve(manifest.step, "model")
        self.write(folder, weights, replace(manifest, content="model"))
        return folder

    def load(self, folder: Path, state: State, optional: Collection[str] = ()) -> Manifest:
        """Verify every file, then fill the given tensors in place. Tensors in `optional` may be missing and then stay
        unchanged.

        Raises DamagedCheckpoint for a bad file, and UserError if a valid checkpoint belongs to another model or its
        frozen weights cannot be read from their base.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from bessemer.checkpoint.dcp import TensorReader

        manifest = verify(folder)
        reader = TensorReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        state = {name: tensor for name, tensor in state.items() if name in saved or name not in optional}
        state = load_quantized(folder, load_frozen(folder, state))
        requested, finish = convert_split_weights(saved, state)
        for name, tensor in requested.items():
            section = "optimizer and memory sections" if name.startswith("optimizer.") else "model"
            fix = f"put the spec's {section} back, or name a new run"
            if name not in saved:
                raise UserError(f"{folder}: has no tensor {name}, which the spec asks for: {fix}")
            size, dtype = tuple(saved[name].size), saved[name].properties.dtype  # type: ignore[union-attr]
            if size != tuple(tensor.shape):
                raise UserError(
                    f"{folder}: tensor {name} has shape {size}, the model asks for {tuple(tensor.shape)}: {fix}"
                )
            # torch converts between floats; quantized codes would be taken for numbers.
            if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
                raise UserError(f"{folder}: tensor {name} is {dtype}, the spec asks for {tensor.dtype}: {fix}")
        silence_single_process_warning()
        try:
            dcp.load(requested, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise DamagedCheckpoint(f"{folder}: {_cause(error)}") from error
        finish()
        return manifest

    def newest_first(self) -> Iterator[Path]:
        """Folders worth trying to load: those with a manifest, even if it proves unreadable."""
        return (path for path in reversed(self._attempts()) if (path / NAME).exists())

    def best(self) -> Path | None:
        """The checkpoint with the best finite validation score."""
        best = best_checkpoint(self._entries())
        return self.folder / best.name if best else None

    def confirm(self, folder: Path) -> bool:
        """Record that the run continued well from here; False if the checkpoint no longer exists."""
        with self._lock:
            if not (folder / NAME).exists():
                return False
            (folder / CONFIRMED).touch()
            sync_path(folder)
            return True

    def confirmed(self) -> list[Path]:
        """Confirmed checkpoints, newest first: the targets of a rollback."""
        return [path for path in self.newest_first() if (path / CONFIRMED).exists()]

    def tagged(self) -> set[str]:
        """Names of tagged checkpoints, which are never deleted here."""
        with suppress(FileNotFoundError, ValueError, AttributeError):
            return set(map(str, json.loads((self.folder / TAGS).read_text(encoding="utf-8")).values()))
        return set()

    def abandon(self, after_step: int) -> list[str]:
        """After a rollback to `after_step`, delete later checkpoints, so that no restart resumes from them.

        Tagged ones are kept, and so is everything if nothing older is left: a doubtful state is better than none.
        """
        with self._lock:
            committed, tagged = self.committed(), self.tagged()
            if all(manifest.step > after_step for _, manifest in committed):
                return []
            late = [path for path, m in committed + self.committed("model") if m.step > after_step]
            return self._delete([path for path in late if path.name not in tagged])

    def thin(
        self, newest: Path, rules: CheckpointSpec, protected: Collection[str] = (), confirming: bool = False
    ) -> list[str]:
        """Delete what the rules do not keep (see `keep`) after `newest` was saved; returns the names."""
        with self._lock:
            entries = self._entries()
            protected = {*protected, *self.tagged()}
            kept_names = keep(entries, rules, newest.name, time.time(), protected, confirming)
            deleted = [self.folder / entry.name for entry in entries if entry.name not in kept_names]
            # Weight copies from abandoned steps go too.
            deleted += [path for path in self._attempts("model") if _key(path) > _key(newest)]
            return self._delete([path for path in deleted if path.name not in protected])

    def _delete(self, folders: list[Path]) -> list[str]:
        for path in folders:
            discard(path)
        return [path.name for path in folders]

    def _entries(self) -> list[CheckpointEntry]:
        return [entry_of(path.name, manifest, (path / CONFIRMED).exists()) for path, manifest in self.committed()]
