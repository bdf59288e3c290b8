"""Injects faults into a run: the loop calls the injector where things go wrong in practice. Each fault happens once.

`python -m bessemer.chaos.inject SPEC FAULTS` is one run of a campaign, in its own process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.chaos.faults import Fault, FlakyFiles, PoisonedStream, make_poison, register_flaky_storage
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.quantized import is_quantized
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec
from bessemer.storage import sync_file
from bessemer.train.job import Job

STORAGE_FAULT_STEPS = 30  # long enough for a save
HANG_S = 8.0
CLOCK_S = 3600.0
LR_FACTOR = 100.0
# The top exponent bit of a float32: for any value below 2 its flip multiplies by 2^128. The bits below it are set in
# usual weights; their flips make one weight of a hundred thousand vanish, which does no harm.
EXPONENT_BIT = 30


class Injector:
    """The faults of one run. Injected faults are logged to disk, since some end the process."""

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        self.faults = {fault.step: fault for fault in faults}
        self.log = folder / "chaos.jsonl"
        self._after_backward: list[Callable[[], None]] = []
        self._lr: Fault | None = None
        self._disk_full = False
        self._until = 0

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        """Attaches the faults to a job that is ready to start."""
        if not isinstance(job.data.stream, BatchStream):
            raise UserError("chaos needs data that can be read again: files, or a dataset with __getitem__")
        poisons = [fault for fault in self.faults.values() if fault.kind.startswith("poison")]
        poison = make_poison(job.data.stream, poisons, tokenizer, job.recorder.run.folder / "poison")
        job.data.stream = PoisonedStream.of(job.data.stream, poison)
        job.faults = self
        for fault in self.faults.values():
            if fault.kind == "overflow":
                self._overflow(job, fault)

    def _injected(self) -> set[int]:
        if not self.log.exists():
            return set()
        return {json.loads(line)["step"] for line in self.log.read_text().splitlines()}

    def _due(self, step: int) -> Fault | None:
        """The fault of this step, if it is reached for the first time."""
        fault = self.faults.get(step)
        if fault is None or step in self._injected():
            return None
        with self.log.open("a") as file:
            file.write(json.dumps({"step": step, "kind": fault.kind, "time": time.time()}) + "\n")
            sync_file(file)
        return fault

    def before_step(self, job: Job, step: int) -> None:
        if step > self._until:
            FlakyFiles.failing = False
            if self._disk_full:
                self._set_disk_full(False)
        fault = self._due(step)
        if fault is None:
            return
        match fault.kind:
            case "nan" | "inf":
                self._corrupt_layer(job, fault)
            case "flip-weight":
                generator = torch.Generator().manual_seed(fault.seed)
                matrices = [p.detach() for p in job.engine.model.parameters() if p.ndim > 1 and not is_quantized(p)]
                flip_bit(matrices, generator)
            case "lr-jump":
                self._lr = fault
            case "flip-gradient":
                self._after_backward.append(lambda: flip_gradient(job, fault))
            case "hang":
                time.sleep(HANG_S)
            case "clock-jump":
                jump_clock(CLOCK_S if fault.seed % 2 else -CLOCK_S)
            case "full-disk":
                self._set_disk_full(True)
                self._until = step + STORAGE_FAULT_STEPS
            case "flaky-storage":
                FlakyFiles.failing = True
                self._until = step + STORAGE_FAULT_STEPS
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case "truncated-checkpoint":
                job.saver.wait(job)
                truncate_newest(CheckpointStore(job.recorder.run.checkpoints))
                os.kill(os.getpid(), signal.SIGKILL)

    def after_backward(self, job: Job, step: int) -> None:
        for action in self._after_backward:
            action()
        self._after_backward = []

    def lr(self, step: int, planned: float) -> float:
        fault, self._lr = self._lr, None
        return planned * LR_FACTOR if fault else planned

    def _set_disk_full(self, full: bool) -> None:
        """Simulates a full disk for this process: files cannot grow beyond a limit."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000 if full else resource.RLIM_INFINITY, hard))
        self._disk_full = full

    def _corrupt_layer(self, job: Job, fault: Fault) -> None:
        """Corrupts one element of a layer's output, for one forward pass."""
        value = float("nan") if fault.kind == "nan" else float("inf")
        block = job.engine.model.blocks[fault.seed % len(job.engine.model.blocks)]

        def corrupt(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed.view(-1)[fault.seed % changed.numel()] = value
            return changed

        self._after_backward.append(block.register_forward_hook(corrupt).remove)

    def _overflow(self, job: Job, fault: Fault) -> None:
        """A layer overflows in low precision on the batch of one step, whenever it is computed."""
        assert isinstance(job.data.stream, BatchStream)
        marked = torch.from_numpy(job.data.stream.batch(fault.step).tokens[0]).to(job.engine.device)
        is_marked = [False]

        def check_batch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            tokens = inputs[0]
            is_marked[0] = tokens.shape[1] == len(marked) and bool((tokens == marked).all(1).any())

        def overflow(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            low = torch.is_autocast_enabled(output.device.type)
            return output * float("inf") if is_marked[0] and low else output

        job.engine.model.register_forward_pre_hook(check_batch)
        job.engine.model.blocks[fault.seed % len(job.engine.model.blocks)].register_forward_hook(overflow)


def flip_bit(tensors: Sequence[Tensor], generator: torch.Generator) -> None:
    """Flips the top exponent bit of one element."""

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
    """Shifts the wall clock of this process; the monotonic clock is not changed."""
    real = time.time
    time.time = lambda: real() + seconds  # type: ignore[assignment]


def truncate_newest(store: CheckpointStore) -> None:
    """Truncates the largest file of the newest checkpoint to half its size."""
    with suppress(StopIteration):
        folder = next(store.newest_first())
        largest = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)


def main(spec_path: str, faults_path: str) -> int:
    register_flaky_storage()
    spec = load_spec(spec_path)
    faults = [Fault(**entry) for entry in json.loads(Path(faults_path).read_text())]
    try:
        outcome = Session(spec, faults=Injector(faults, run_folder(spec))).train()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if outcome.kind == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
