"""Faults carried out: the loop calls in at the places where things go wrong. Each fault happens once in a run."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.chaos.faults import Fault, FlakyFiles, PoisonedStream, make_poison
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.storage import sync_file
from bessemer.train.job import Job

SAVES_WITHIN = 30  # steps for which a disk or a storage stays bad: long enough for a save
HANG_S = 8.0
CLOCK_S = 3600.0
LR_FACTOR = 100.0
# The top exponent bit of a float32: for any value below 2 its flip multiplies by 2^128. The bits below it are set in
# usual weights, and their flips make one weight of a hundred thousand vanish, which nothing needs to notice.
EXPONENT_BIT = 30


class Injector:
    """The faults of one run. What has happened is written down, since some faults end the process."""

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        self.faults = {fault.step: fault for fault in faults}
        self.log = folder / "chaos.jsonl"
        self._undo: list[Callable[[], None]] = []
        self._lr: Fault | None = None
        self._disk = False
        self._until = 0

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        """Put the faults into a job that is ready to start."""
        if not isinstance(job.data.stream, BatchStream):
            raise UserError("chaos needs data that can be read again: files, or a dataset with __getitem__")
        poisons = [fault for fault in self.faults.values() if fault.kind.startswith("poison")]
        poison = make_poison(job.data.stream, poisons, tokenizer, job.recorder.run.folder / "poison")
        job.data.stream = PoisonedStream.of(job.data.stream, poison)
        job.faults = self
        for fault in self.faults.values():
            if fault.kind == "overflow":
                self._overflow(job, fault)

    def _happened(self) -> set[int]:
        if not self.log.exists():
            return set()
        return {json.loads(line)["step"] for line in self.log.read_text().splitlines()}

    def _due(self, step: int) -> Fault | None:
        """The fault of this step, the first time that the step is reached."""
        fault = self.faults.get(step)
        if fault is None or step in self._happened():
            return None
        with self.log.open("a") as file:
            file.write(json.dumps({"step": step, "kind": fault.kind, "time": time.time()}) + "\n")
            sync_file(file)
        return fault

    def before_step(self, job: Job, step: int) -> None:
        if step > self._until:
            FlakyFiles.failing = False
            if self._disk:
                self._room(True)
        fault = self._due(step)
        if fault is None:
            return
        match fault.kind:
            case "nan" | "inf":
                self._spoil_layer(job, fault)
            case "flip-weight":
                generator = torch.Generator().manual_seed(fault.seed)
                flip_bit([p.detach() for p in job.engine.model.parameters() if p.ndim > 1], generator)
            case "lr-jump":
                self._lr = fault
            case "flip-gradient":
                self._undo.append(lambda: flip_gradient(job, fault))
            case "hang":
                time.sleep(HANG_S)
            case "clock-jump":
                jump_clock(CLOCK_S if fault.seed % 2 else -CLOCK_S)
            case "full-disk":
                self._room(False)
                self._until = step + SAVES_WITHIN
            case "flaky-storage":
                FlakyFiles.failing = True
                self._until = step + SAVES_WITHIN
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case "truncated-checkpoint":
                job.saver.wait(job)
                cut_newest(CheckpointStore(job.recorder.run.checkpoints))
                os.kill(os.getpid(), signal.SIGKILL)

    def after_backward(self, job: Job, step: int) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def lr(self, step: int, planned: float) -> float:
        fault, self._lr = self._lr, None
        return planned * LR_FACTOR if fault else planned

    def _room(self, there_is: bool) -> None:
        """A disk without room for a checkpoint, as far as this process can tell: files cannot grow beyond a limit."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if there_is else 400_000, hard))
        self._disk = not there_is

    def _spoil_layer(self, job: Job, fault: Fault) -> None:
        """One element of one layer's output, for one forward pass."""
        value = float("nan") if fault.kind == "nan" else float("inf")
        block = job.engine.model.blocks[fault.seed % len(job.engine.model.blocks)]

        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed.view(-1)[fault.seed % changed.numel()] = value
            return changed

        self._undo.append(block.register_forward_hook(spoil).remove)

    def _overflow(self, job: Job, fault: Fault) -> None:
        """A layer that leaves the range of a low precision on the batch of one step, whenever it is computed."""
        assert isinstance(job.data.stream, BatchStream)
        marked = torch.from_numpy(job.data.stream.batch(fault.step).tokens[0]).to(job.engine.device)
        seen = [False]

        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            tokens = inputs[0]
            seen[0] = tokens.shape[1] == len(marked) and bool((tokens == marked).all(1).any())

        def overflow(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            low = torch.is_autocast_enabled(output.device.type)
            return output * float("inf") if seen[0] and low else output

        job.engine.model.register_forward_pre_hook(look)
        job.engine.model.blocks[fault.seed % len(job.engine.model.blocks)].register_forward_hook(overflow)


def flip_bit(tensors: Sequence[Tensor], generator: torch.Generator) -> None:
    """Flip the top exponent bit of one element."""

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    flat = tensors[draw(len(tensors))].view(-1)
    at = draw(flat.numel())
    (bits,) = struct.unpack("<I", struct.pack("<f", float(flat[at])))
    (flipped,) = struct.unpack("<f", struct.pack("<I", bits ^ (1 << EXPONENT_BIT)))
    flat[at] = flipped


def flip_gradient(job: Job, fault: Fault) -> None:
    gradients = [p.grad for p in job.engine.model.parameters() if p.grad is not None]
    flip_bit(gradients, torch.Generator().manual_seed(fault.seed))


def jump_clock(seconds: float) -> None:
    """The wall clock of this process, from now on; the steady clock goes on as it was."""
    real = time.time
    time.time = lambda: real() + seconds  # type: ignore[assignment]


def cut_newest(shelf: CheckpointStore) -> None:
    """The newest checkpoint loses the second half of its largest file."""
    with suppress(StopIteration):
        folder = next(shelf.newest_first())
        largest = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
