"""Reads a checkpoint's tensors one at a time, writes weights-only checkpoints, averages checkpoints (uniform,
exponential, and the greedy soup of Wortsman et al. 2022, arXiv:2203.05482) and compares them.

Averages are summed in fp64 on the CPU, tensor by tensor; only the result is held in memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from bessemer.checkpoint.base import frozen_tensors
from bessemer.checkpoint.dcp import CheckedWriter, TensorReader
from bessemer.checkpoint.manifest import DamagedCheckpoint, Manifest, commit
from bessemer.checkpoint.store import MODEL, CheckpointStore, _cause, silence_single_process_warning
from bessemer.errors import UserError


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder and its base, each read from disk on access: memory holds one tensor.

    The index is read once: at 1,000 ranks it is larger than many tensors. Files are not hashed here; verify first.
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
        self._frozen = None if reader else frozen_tensors(folder)
        names = [MODEL + name for name in self._frozen or () if (MODEL + name).startswith(prefix)]
        self._frozen_names = {name.removeprefix(prefix): name.removeprefix(MODEL) for name in names}

    def __getitem__(self, name: str) -> Tensor:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        if self._frozen and name in self._frozen_names:
            return self._frozen[self._frozen_names[name]]
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        silence_single_process_warning()
        try:
            dcp.load({self._prefix + name: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException
            cause = _cause(error)
            message = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise DamagedCheckpoint(f"{self.folder}: tensor {name} cannot be read: {message}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return chain(self._entries, self._frozen_names)

    def __len__(self) -> int:
        return len(self._entries) + len(self._frozen_names)

    def blank(self) -> dict[str, Tensor]:
        """All tensors by name, on the meta device."""
        layouts = {name: (entry.size, entry.properties.dtype) for name, entry in self._entries.items()}
        for name, frozen_name in self._frozen_names.items():
            assert self._frozen is not None
            tensor = self._frozen.base.tensors[frozen_name]
            layouts[name] = torch.Size(tensor.shape), tensor.torch_dtype
        return {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in layouts.items()}


def save_model(
    folder: Path, weights: Mapping[str, Tensor], made_from: dict[str, Any], like: Manifest | None = None,
    loss: float | None = None,
) -> Path:  # fmt: skip
    """A weights-only checkpoint, `model-N.aK`, with its sources in the manifest.

    `like` provides the step and fingerprints of a run; without it the step is 0, for a new run to start from.
    """
    store, manifest = CheckpointStore(folder), _manifest(made_from, like, loss)
    checkpoint = store.reserve(manifest.step, "model")
    store.write(checkpoint, {MODEL + name: tensor.contiguous() for name, tensor in weights.items()}, manifest)
    return checkpoint


def _manifest(made_from: dict[str, Any], like: Manifest | None = None, loss: float | None = None) -> Manifest:
    manifest = like or Manifest(
        step=0, attempt=0, stream_fingerprint="", stream={}, spec_fingerprint="", segments=[], batch_rows=[],
        progress={}, threads=torch.get_num_threads(), device="cpu", versions={"torch": torch.__version__}, time=0.0,
    )  # fmt: skip
    return replace(
        manifest, content="model", progress={"made_from": made_from}, time=time.time(), validation_loss=loss,
        stream_state=None, guard={}, base={},
    )  # fmt: skip


class _StreamingPlanner(DefaultSavePlanner):
    """Plans from meta tensors; each tensor is read when it is written, in their order."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(MODEL)).contiguous()


def stream_model(
    folder: Path, blank: Mapping[str, Tensor], read: Callable[[str], Tensor], made_from: dict[str, Any]
) -> Path:
    """Like `save_model`, for weights that do not fit into memory: `read` is called for one after another.

    A failure leaves files without a manifest: no checkpoint.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    checkpoint = CheckpointStore(folder).reserve(0, "model")
    writer = CheckedWriter(checkpoint, copy_ahead_bytes=0)
    silence_single_process_warning()
    try:
        planner, names = _StreamingPlanner(read), {MODEL + name: tensor for name, tensor in blank.items()}
        dcp.save(names, storage_writer=writer, planner=planner, no_dist=True)
        commit(checkpoint, replace(_manifest(made_from), attempt=1, files=writer.read_back()))
    except CheckpointException as error:  # a BaseException
        raise _cause(error) from error
    return checkpoint


Weights = Mapping[str, Tensor]


def average(sources: Sequence[Weights], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of each tensor, in its own dtype. `weights` are relative; None weights all equally."""
    shares = [1.0] * len(sources) if weights is None else list(weights)
    if not sources or len(shares) != len(sources) or min(shares) < 0 or sum(shares) <= 0:
        raise UserError(f"{len(sources)} checkpoints and weights {shares}: give one weight >= 0 per checkpoint")
    for source in sources[1:]:
        if unmatched := sorted(set(source) ^ set(sources[0])):
            raise UserError(f"cannot average different models: {unmatched[0]} is not in all checkpoints")
    total = sum(shares)
    return {name: _mean(name, sources, [share / total for share in shares]) for name in sources[0]}


def _mean(name: str, sources: Sequence[Weights], shares: list[float]) -> Tensor:
    tensor = sources[0][name]
    dtype, mean = tensor.dtype, tensor.double() * shares[0]
    for source, share in zip(sources[1:], shares[1:], strict=True):
        tensor = source[name]
        if tensor.shape != mean.shape:
            raise UserError(f"{name} has shapes {tuple(mean.shape)} and {tuple(tensor.shape)}: not the same model")
        mean.add_(tensor.double(), alpha=share)
    return mean.to(dtype)


def exponential_weights(count: int, decay: float) -> list[float]:
    """Weights, oldest first, of `mean = decay * mean + (1 - decay) * next`, starting with the oldest."""
    if not 0 <= decay < 1:
        raise UserError(f"decay {decay}: write a number from 0 up to but excluding 1, such as 0.5")
    return [decay ** (count - 1 - i) * (1 - decay if i else 1.0) for i in range(count)]


@dataclass(frozen=True)
class Soup:
    """The greedy soup's checkpoints in the order they were added, and the loss of each alone."""

    names: list[str]
    loss: float
    alone: dict[str, float]
    weights: dict[str, Tensor]


def greedy_soup(sources: Mapping[str, Weights], evaluate: Callable[[Weights], float]) -> Soup:
    """Start with the best checkpoint; add the others, best first, each only if the average's loss decreases.

    Evaluates every checkpoint alone and every trial: 2n - 1 evaluations. A NaN loss never improves anything.
    """
    alone = {name: evaluate(source) for name, source in sources.items()}
    order = sorted(alone, key=lambda name: (alone[name] != alone[name], alone[name]))
    chosen, loss = [order[0]], alone[order[0]]
    for name in order[1:]:
        trial = evaluate(average([sources[part] for part in [*chosen, name]]))
        if trial < loss:
            chosen, loss = [*chosen, name], trial
    return Soup(chosen, loss, alone, average([sources[name] for name in chosen]))


@dataclass(frozen=True)
class TensorChange:
    """One tensor. `relative` is |b - a| / |a| (Euclidean), `largest` the largest change of an element; both are 0 for
    equal bits, inf if a number became NaN or infinite, None if only one side has the tensor or the shapes differ."""

    name: str
    what: str  # same, changed, only in A, only in B, or both shapes
    relative: float | None = None
    largest: float | None = None


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[TensorChange]:
    """Every tensor of either, in the order of a. Holds two tensors at a time."""
    for name in a:
        yield _change(name, a[name], b[name]) if name in b else TensorChange(name, "only in A")
    for name in b:
        if name not in a:
            yield TensorChange(name, "only in B")


def _change(name: str, a: Tensor, b: Tensor) -> TensorChange:
    if a.shape != b.shape or a.dtype != b.dtype:
        return TensorChange(name, f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}".replace("torch.", ""))
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    if torch.equal(*bits):
        return TensorChange(name, "same", 0.0, 0.0)
    changed = (bits[0] != bits[1]).view(-1, a.element_size()).any(1)
    wide = torch.float64 if a.is_floating_point() else torch.int64  # float64 is inexact beyond 2**53
    differences = (b.reshape(-1)[changed].to(wide) - a.reshape(-1)[changed].to(wide)).double().abs()
    differences = differences.nan_to_num(math.inf, math.inf)
    size = a.double().nan_to_num(0.0, 0.0, 0.0).norm().item()
    relative = differences.norm().item() / size if size else math.inf
    return TensorChange(name, "changed", relative, differences.max().item())
